# SPDX-License-Identifier: Apache-2.0
"""Families of which some components are in float32 and the others in bfloat16, read from files by diffusers and by the worker."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_worker.config import Dtype, WorkerConfig
from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.families.rig.all import FAMILIES
from support.families.rig.family import Arguments, Family
from support.families.rig.family_rig import Asked, FamilyRig

EXAMPLES = re.compile(r'EXAMPLE_DOC_STRING\w* = """(.*?)"""', re.DOTALL)
IN_FLOAT32 = re.compile(
    r"(\w+) = \w+\.from_pretrained\((?:[^()]|\([^()]*\))*?dtype=torch\.float32|pipe\w*\.(\w+)\.to\((?:dtype=)?torch\.float32"
)


def class_of(family: Family) -> Any:
    return getattr(diffusers, family.name.partition(" (")[0])


MIXED = [family for family in FAMILIES if pipeline_record(class_of(family)).in_float32]
MIXED_BY_NAME = {family.name: family for family in MIXED}
mixed_families = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one.name == "WanPipeline" else pytest.mark.slow, id=one.name) for one in MIXED]
)


class MixedRig(FamilyRig):
    """A rig whose pipelines keep the dtypes that they were read with. Prompt embeddings get the denoiser's dtype."""

    def _build(self) -> Any:
        return self.family.build()

    def _arguments(self, asked: Asked) -> Arguments:
        given = super()._arguments(asked)
        return {
            name: value.to(self.dtype) if isinstance(value, torch.Tensor) and "embeds" in name else value for name, value in given.items()
        }


def from_files(family: Family, folder: Path, dtype: Any) -> Family:
    """Save the family's pipeline to a folder, and return the family with pipelines that are read from there.

    The first is read by the worker, the second by diffusers; there is no third.
    """
    built = family.build()
    built.save_pretrained(folder)
    absent = {name: None for name, part in built.components.items() if part is None}
    config = WorkerConfig(model=str(folder), served_name="mixed")
    made = iter(
        [
            lambda: load_pipeline(config, dtype["default"]),
            lambda: type(built).from_pretrained(folder, dtype=dtype, local_files_only=True, **absent),
        ]
    )

    def build() -> Any:
        pipeline = next(made)()
        pipeline.set_progress_bar_config(disable=True)
        if isinstance(pipeline, diffusers.AllegroPipeline):
            pipeline.vae.enable_tiling()  # it decodes in tiles only
        return pipeline

    return replace(family, build=build, output_type="pt")


@mixed_families
def test_a_family_with_components_in_float32_equals_diffusers_with_the_same_dtypes(family: Family, tmp_path: Path) -> None:
    wanted = pipeline_record(class_of(family)).in_float32
    dtype = {"default": torch.bfloat16} | dict.fromkeys(wanted, torch.float32)
    rig = MixedRig(from_files(family, tmp_path, dtype), torch.bfloat16)
    alone = rig.alone(Asked(seed=1, steps=2))
    for name, part in rig.pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            assert part.dtype is (torch.float32 if name in wanted else torch.bfloat16), name
    (served,) = rig.together(Asked(seed=1, steps=2))
    assert served.shape == alone.shape
    assert int((served != alone).sum()) == 0


def test_an_option_goes_before_the_dtype_that_diffusers_example_has(tmp_path: Path) -> None:
    MIXED_BY_NAME["WanPipeline"].build().save_pretrained(tmp_path)
    config = WorkerConfig(model=str(tmp_path), served_name="mixed", component_dtypes={"vae": Dtype.FLOAT16})
    pipeline = load_pipeline(config, torch.bfloat16)
    assert (pipeline.vae.dtype, pipeline.transformer.dtype) == (torch.float16, torch.bfloat16)


@pytest.mark.slow
def test_sdxl_in_float16_decodes_in_float32_as_diffusers_does() -> None:
    """Compare an image of the worker with that of diffusers, whose VAE has `force_upcast` and is converted for the decode.

    The worker has to convert a copy, because the VAE is shared.
    """
    family = replace(next(one for one in FAMILIES if one.name == "StableDiffusionXLPipeline"), output_type="pt")
    rig = FamilyRig(family, torch.float16)
    assert rig.pipeline.vae.config.force_upcast
    alone = rig.alone(Asked(seed=1, steps=2))
    (served,) = rig.together(Asked(seed=1, steps=2))
    assert {call.module.dtype for call in rig.rank.calls if call.component == "vae"} == {torch.float32}
    assert rig.pipeline.vae.dtype is torch.float16
    assert int((served != alone).sum()) == 0


def test_the_components_in_float32_are_those_of_diffusers_own_examples() -> None:
    """Read from diffusers' own examples which components each class loads in float32, and compare with the records.

    The modular classes have no examples.
    """
    root = Path(diffusers.__file__).parent / "pipelines"
    found: dict[str, set[str]] = {}
    for path in root.rglob("pipeline_*.py"):
        text = path.read_text()
        lines = [line.strip().removeprefix(">>> ").removeprefix("... ") for line in "".join(EXAMPLES.findall(text)).splitlines()]
        names = {name for pair in IN_FLOAT32.findall("\n".join(lines)) for name in pair if name} - {"pipe"}
        for written in re.findall(r"^class (\w+Pipeline)\(", text, re.MULTILINE) if names else ():
            found[written] = names
    assert len(found) >= 18
    assert {name: set(pipeline_record(getattr(diffusers, name)).in_float32) for name in found} == found
    recorded = {name for name in dir(diffusers) if name.endswith("Pipeline") and pipeline_record(getattr(diffusers, name)).in_float32}
    assert {name for name in recorded if "Modular" not in name} == found.keys()
