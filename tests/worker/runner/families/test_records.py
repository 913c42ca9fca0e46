# SPDX-License-Identifier: Apache-2.0
"""The records of classes: complete, true of the installed libraries, and the only place with names of their classes."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import diffusers
import msgspec
import pytest
import transformers
from diffusers.hooks import mag_cache

from diffusion_worker import runner
from diffusion_worker.runner import families
from diffusion_worker.runner.families import ModelRecord, PipelineRecord, model_record, models, pipeline_record, pipelines
from diffusion_worker.runner.pipelines.diffusers_workarounds import WORKAROUNDS
from support.syntax import parse
from tools import pipeline_facts
from tools.families import differences, find_class

RUNNER = Path(runner.__file__).parent
MODELS = [pytest.param(record, id=record.name) for record in models()]
PIPELINES = [pytest.param(record, id=record.name) for record in pipelines()]


def class_names() -> frozenset[str]:
    """Return the names of the classes in the sources of diffusers and transformers that have more than one capital and a small letter."""
    sources = (path.read_text() for library in (diffusers, transformers) for path in Path(library.__file__).parent.rglob("*.py"))
    names = (name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE))
    return frozenset(name for name in names if any(map(str.islower, name)) and sum(map(str.isupper, name)) > 1)


def quoted(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and value of each string literal in a Python file, docstrings included."""
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_file_of_the_runner_but_the_families_names_a_class_of_diffusers_or_transformers() -> None:
    names = class_names()
    assert {"FluxTransformer2DModel", "GlmImageKVCache", "CLIPTextModel"} <= names
    files = [path for path in RUNNER.rglob("*.py") if path.parent.name != "families"]
    found = [(path.relative_to(RUNNER).as_posix(), line, text) for path in files for line, text in quoted(path) if text in names]
    assert found == []


@pytest.mark.parametrize("record", MODELS)
def test_a_record_of_a_model_has_the_signatures_that_are_installed(record: ModelRecord) -> None:
    assert record.signatures, "a record says what it was tested with"
    wrong = list(differences(record))
    assert not wrong, "\n".join([*wrong, f"look at the record of {record.name}, then run `python -m tools.families --write`"])


@pytest.mark.slow
def test_the_facts_of_pipelines_are_those_that_the_installed_source_says() -> None:
    wrong = list(pipeline_facts.differences())
    assert not wrong, "\n".join([*wrong, "look at these classes, then run `python -m tools.families --write`"])


def test_stable_diffusion_3_still_forgets_the_shift_when_it_decodes_an_inpainted_image() -> None:
    # If this fails, Workaround.SD3_INPAINTING has to leave the decoding alone.
    source = pipeline_facts.source_of(diffusers.StableDiffusion3InpaintPipeline.__call__)
    assert "vae.decode(latents / self.vae.config.scaling_factor, " in source


def test_a_changed_argument_is_named_with_its_record() -> None:
    record = model_record(find_class("FluxTransformer2DModel"))
    told = record.signatures["forward"].replace("guidance=None", "scale=None")
    assert told != record.signatures["forward"]
    [line] = differences(msgspec.structs.replace(record, signatures={"forward": told}))
    assert line.startswith("FluxTransformer2DModel.forward: tested with diffusers ")


@pytest.mark.parametrize("record", MODELS)
def test_a_record_names_arguments_and_parts_that_its_model_has(record: ModelRecord) -> None:
    found = find_class(record.name)
    parameters = inspect.signature(found.forward).parameters
    wanted = [item.argument for item in record.roles]
    if (plan := record.sequence) is not None:
        wanted += ["hidden_states", *filter(None, [plan.text]), *(item.tensor for item in plan.splits if item.module == "")]
        assert plan.splits or found._cp_plan
        assert bool(plan.splits) == bool(plan.gathered) == bool(plan.why)
        for part in (plan.gathered, *(item.module for item in plan.splits)):
            assert not part or f"self.{part} = " in inspect.getsource(found)
    assert set(wanted) <= parameters.keys()
    assert all(item.why for item in record.roles)
    assert not record.tensor or found._tp_plan
    assert not record.mag_ratios or hasattr(mag_cache, record.mag_ratios)
    for name in filter(None, [record.positions and record.positions.learned, record.sequence and record.sequence.joint_processor]):
        assert find_class(name) is not None


@pytest.mark.parametrize("record", PIPELINES)
def test_a_record_of_a_pipeline_is_of_one_that_diffusers_exports_and_says_something(record: PipelineRecord) -> None:
    found = getattr(diffusers, record.name)
    assert pipeline_record(found) is record
    assert record != PipelineRecord(record.name)
    for companion in filter(None, [record.edits_by, record.inpaints_by]):
        assert hasattr(diffusers, companion)
    assert not record.needs_reference or record.references
    assert record.workarounds <= WORKAROUNDS.keys()


def test_a_class_without_a_record_has_that_of_the_class_it_extends_or_none() -> None:
    mine = type("Mine", (diffusers.Flux2KleinPipeline,), {})
    assert pipeline_record(mine).references == 16
    assert pipeline_record(diffusers.StableDiffusionPipeline) == PipelineRecord("")
    assert model_record(type("MyModel", (diffusers.DiTTransformer2DModel,), {})).unsharded
    assert model_record(int) == ModelRecord("")


def test_no_class_of_diffusers_inherits_the_record_of_another() -> None:
    found = [getattr(diffusers, name) for name in dir(diffusers)]
    pipes = [item for item in found if inspect.isclass(item) and issubclass(item, diffusers.DiffusionPipeline | diffusers.ModularPipeline)]
    assert len(pipes) > 300
    assert [item.__name__ for item in pipes if pipeline_record(item).name not in ("", item.__name__)] == []
    modules = [item for item in found if inspect.isclass(item) and issubclass(item, diffusers.ModelMixin)]
    assert len(modules) > 100
    # This one has the forward of the UNet, whose record has no other fact than that.
    assert [item.__name__ for item in modules if model_record(item).name not in ("", item.__name__)] == ["DreamLiteUNetModel"]


def test_a_second_record_for_a_name_is_refused() -> None:
    known = next(models())
    families.register(known)
    with pytest.raises(ValueError, match=f"a different record is registered already for a class named {known.name}"):
        families.register(ModelRecord(known.name))
