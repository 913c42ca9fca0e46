# SPDX-License-Identifier: Apache-2.0
"""Every test family: the `FAMILIES` of all files in this folder."""

import importlib
from pathlib import Path

import pytest

from families.family import Family

# One of each kind of denoiser, of guidance and of layout of rows. The checks of all others are slow tests.
REPRESENTATIVE = {
    "FluxPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionControlNetPipeline",
    "WanPipeline",
    "ZImagePipeline",
}


def _modules() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py"))


FAMILIES: list[Family] = [
    family for name in _modules() if name != "all" for family in getattr(importlib.import_module(f"families.{name}"), "FAMILIES", [])
]

every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family.name in REPRESENTATIVE else pytest.mark.slow, id=family.name) for family in FAMILIES],
)
