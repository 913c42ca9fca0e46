# SPDX-License-Identifier: Apache-2.0
"""Writes docs/models.md: every pipeline that the installed diffusers exports, and how the worker runs it.

Everything but the reasons below is found by looking at the classes: what they make by what they return, and how they run by
`diffusion_worker.runner.pipelines.step_support`. The families of tests/support say what is tested. `--check` only compares.
"""

import collections
import importlib
import inspect
import sys
import typing
from pathlib import Path
from typing import Any, NamedTuple

import click
import diffusers
import torch
import transformers

from diffusion_worker.runner.families import merged_methods
from diffusion_worker.runner.merging import trust_in
from diffusion_worker.runner.pipelines.description import blocks_of, kind_of
from diffusion_worker.runner.pipelines.step_support import missing_libraries, whole_run_reason, why_impossible

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BASES = ("DiffusionPipeline", "ModularPipeline")
IMAGES = frozenset({"image", "images", "mask_image", "control_image", "video", "source_image", "cond_image", "control_video", "references"})

# Classes that stand for any model.
BASE_MODELS = (torch.nn.Module, diffusers.ModelMixin, transformers.PreTrainedModel)

# Outputs of the classes that make neither images nor videos.
MAKES = {
    "DiffusionGemmaPipeline": "text",
    "FluxPriorReduxPipeline": "embeddings",
    "KandinskyPriorPipeline": "embeddings",
    "KandinskyV22PriorEmb2EmbPipeline": "embeddings",
    "KandinskyV22PriorPipeline": "embeddings",
    "LLaDA2Pipeline": "text",
    "MarigoldDepthPipeline": "depth maps",
    "MarigoldIntrinsicsPipeline": "material maps",
    "MarigoldNormalsPipeline": "normal maps",
    "RFD4ProteinaPipeline": "protein structures",
    "ShapEImg2ImgPipeline": "3D shapes",
    "ShapEPipeline": "3D shapes",
    "StableCascadePriorPipeline": "embeddings",
    "WuerstchenPriorPipeline": "embeddings",
}
# Classes that cannot run for a reason outside their source.
NOT = {
    "VersatileDiffusionPipeline": "has no call of its own; its parts are pipelines of their own",
}
# Stepped classes that share less than others.
SHARES = {
    "Flux2KleinKVPipeline": "requests with reference images share no calls: each caches their keys and values",
    "GlmImagePipeline": "requests with reference images share no calls: each caches their keys and values",
    "OmniGenPipeline": "only prompts of one length share calls, requests with images none",
    "QwenImage21Pipeline": "calls are shared with use_kv_cache=False only: else each request caches keys and values of its prompt",
}

INTRODUCTION = """\
# Pipelines

Every pipeline that diffusers {version} exports, and how the worker runs it. Made by `python -m tools.models_table`; do not edit.

**stepped**: requests with other prompts, seeds, steps, guidance and conditioning share model calls, step by step.
**whole**: a request does not step with others. A class that changes the shared model runs while nobody else advances. A class that
steps no scheduler advances by single model calls instead, shared where possible.
**not**: the worker refuses it at start, with the reason.

*tested* means that the tests run a tiny model of the class through the engine: alone bit-equal to diffusers, in company equal up
to rounding. All others are run by the same mechanism and were judged by reading their source only. The images API takes
prompts, and images for classes that make an image from text and images. `/v1/models` lists the routes that a loaded model serves.
A route for videos is not there yet.

*calls*: **merged** means that each model class of the pipeline has a record, so that requests share its calls. The classes behind **alone**
have none, so their calls run alone ([merged calls](custom-pipelines.md#merged-calls)). The column knows the classes that the pipeline
declares. A folder may have others, and the state document says what holds for them. With **alone** by itself no calls are merged.

{counts}

| pipeline | makes | takes | runs | reason | calls | tested |
|---|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A pipeline of diffusers on the page: what it makes and takes, how it runs and why, how its calls are merged, `yes` if tested."""

    name: str
    makes: str
    takes: str
    runs: str
    why: str
    calls: str
    tested: str


def row_of(name: str, tested: frozenset[str]) -> Row:
    """Return the row of a class that diffusers exports, by its name; `tested` has the names of the tested ones."""
    found = getattr(diffusers, name)
    if not issubclass(found, diffusers.DiffusionPipeline | diffusers.ModularPipeline):
        return Row(name, "", "", "not", f"needs {' and '.join(missing_libraries(found))}, which the worker does not have", "", "")
    kind = kind_of(found)
    makes = MAKES.get(name, kind)
    runs, why = _how(name, found, makes)
    deprecated = "deprecated in diffusers" if ".deprecated." in found.__module__ else ""
    calls = {"not": "", "whole": "alone"}[runs] if runs != "stepped" else _calls(found)
    return Row(name, makes, _takes(found), runs, "; ".join(filter(None, [why, deprecated])), calls, "yes" if name in tested else "")


def _calls(found: Any) -> str:
    unknown = sorted({kind.__name__ for kind in declared_models(found) if not all(trust_in(kind, one).ok for one in merged_methods(kind))})
    return f"alone: {', '.join(unknown)}" if unknown else "merged"


def declared_models(found: Any) -> list[Any]:
    """Return the model classes that a pipeline class declares as its components; base classes, which stand for any model, do not count."""
    if issubclass(found, diffusers.ModularPipeline):
        declared = [item.type_hint for item in blocks_of(found).expected_components]
    else:
        parameters = inspect.signature(found.__init__).parameters.values()
        declared = [parameter.annotation for parameter in parameters]
    kinds = [kind for hint in declared for kind in (typing.get_args(hint) or (hint,)) if inspect.isclass(kind)]
    # A class such as Gemma2PreTrainedModel stands for any model of its kind.
    return [kind for kind in kinds if issubclass(kind, torch.nn.Module) and kind not in BASE_MODELS and "PreTrained" not in kind.__name__]


def _how(name: str, found: Any, makes: str) -> tuple[str, str]:
    impossible = NOT.get(name) or why_impossible(found)
    if impossible:
        return "not", impossible
    if makes not in ("image", "video"):
        return "not", f"makes {makes}; the worker serves images and videos"
    whole = whole_run_reason(found)
    return ("whole", whole) if whole else ("stepped", SHARES.get(name, ""))


def _takes(found: Any) -> str:
    if issubclass(found, diffusers.ModularPipeline):
        names = {item.name for item in blocks_of(found).inputs}
    else:
        names = set(inspect.signature(found.__call__).parameters)
    given = ["text"] if "prompt" in names else []
    return ", ".join([*given, *(["image"] if names & IMAGES else [])])


def tested_classes() -> frozenset[str]:
    """Return the names of the classes that have a family in tests/support; a family's variants count for its class."""
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
    families = importlib.import_module("support.families.rig.all").FAMILIES
    return frozenset(family.name.partition(" (")[0] for family in families)


def page() -> str:
    """Build docs/models.md from the installed diffusers and return its text; nothing is written."""
    names = [name for name in sorted(dir(diffusers)) if name.endswith("Pipeline") and name not in BASES]
    tested = tested_classes()
    rows = [row_of(name, tested) for name in names]
    by_way = collections.Counter(row.runs for row in rows)
    counts = f"{len(rows)} pipelines: {by_way['stepped']} stepped, {by_way['whole']} whole, {by_way['not']} not; " + (
        f"{sum(row.tested == 'yes' for row in rows)} tested."
    )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return INTRODUCTION.format(version=diffusers.__version__, counts=counts) + "\n".join(lines) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if the page is not what would be written.")
def main(*, check: bool) -> None:
    """Write docs/models.md; with --check, write nothing and fail if the page differs."""
    made = page()
    if not check:
        PAGE.write_text(made)
    elif PAGE.read_text() != made:
        raise click.ClickException("docs/models.md is not what `python -m tools.models_table` writes")


if __name__ == "__main__":
    main()
