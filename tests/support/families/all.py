# SPDX-License-Identifier: Apache-2.0
"""Every test family: the `FAMILIES` of all files in this folder."""

import importlib
from pathlib import Path

from families.family import Family

# One of each kind of denoiser and of guidance; the others of the long checks are marked slow.
REPRESENTATIVE = {"StableDiffusionControlNetPipeline", "StableDiffusion3Pipeline", "FluxPipeline", "WanPipeline"}


def _modules() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py"))


FAMILIES: list[Family] = [
    family for name in _modules() if name != "all" for family in getattr(importlib.import_module(f"families.{name}"), "FAMILIES", [])
]
