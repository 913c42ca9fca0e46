# SPDX-License-Identifier: Apache-2.0
"""Every test family: the `FAMILIES` of all files in `images` and `videos`."""

import importlib
from pathlib import Path

import pytest

from support.families.rig.family import Family


def _modules() -> list[str]:
    found = [path for room in ("images", "videos") for path in (Path(__file__).parents[1] / room).glob("*.py")]
    return [f"{path.parent.name}.{path.stem}" for path in sorted(found, key=lambda path: path.stem)]


FAMILIES: list[Family] = [
    family for name in _modules() for family in getattr(importlib.import_module(f"support.families.{name}"), "FAMILIES", [])
]

every_family = pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow, id=family.name) for family in FAMILIES])
