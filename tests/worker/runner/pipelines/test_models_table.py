# SPDX-License-Identifier: Apache-2.0
"""docs/models.md lists every pipeline that the installed diffusers exports, as the script writes it."""

import diffusers
import pytest

from diffusion_worker.runner.pipelines.step_support import whole_run_reason, why_exclusive, why_impossible
from tools import models_table


@pytest.mark.slow
def test_every_pipeline_that_diffusers_exports_is_in_the_table_as_the_script_makes_it() -> None:
    made = models_table.page()
    assert models_table.PAGE.read_text() == made, "run `python -m tools.models_table`"
    for name in dir(diffusers):
        if name.endswith("Pipeline") and name not in models_table.BASES:
            assert f"\n| {name} |" in made
    ways = {line.split(" | ")[3] for line in made.splitlines() if line.startswith("| ") and "Pipeline |" in line}
    assert ways == {"stepped", "whole", "not"}


def test_whatever_is_not_stepped_says_why() -> None:
    for line in models_table.PAGE.read_text().splitlines():
        if "Pipeline |" in line and line.split(" | ")[3] != "stepped":
            assert line.split(" | ")[4].strip(), line


@pytest.mark.parametrize(
    ("name", "exclusive", "whole"),
    [
        ("StableDiffusionPipeline", None, None),
        ("StableDiffusionPAGPipeline", "swaps the model's attention processors during its call", "swaps"),
        ("JoyImageEditPipeline", "hooks a model during its call", "hooks"),
        ("LTXLatentUpsamplePipeline", None, "steps no scheduler"),
        ("KandinskyV22CombinedPipeline", None, None),
        ("StableDiffusion3ModularPipeline", None, None),
        ("EchoModularPipeline", None, "steps no scheduler"),
    ],
)
def test_how_a_class_runs_is_in_the_table_of_facts(name: str, exclusive: str | None, whole: str | None) -> None:
    found = getattr(diffusers, name)
    assert why_exclusive(found) == exclusive
    assert (whole_run_reason(found) or "").startswith(whole or "")
    assert (whole_run_reason(found) is None) == (whole is None)


def test_a_pipeline_that_needs_gradients_is_impossible() -> None:
    assert "gradients" in (why_impossible(diffusers.StableDiffusionAttendAndExcitePipeline) or "")
    assert why_impossible(diffusers.StableDiffusionPipeline) is None
