# SPDX-License-Identifier: Apache-2.0
"""Every test family: the `FAMILIES` of all files in `images` and `videos`, and samples: a variant of each family, and some of these."""

import importlib
from pathlib import Path

import pytest

from support.families.rig.family import Family
from support.sample import one_of_each, sample


def _modules() -> list[str]:
    found = [path for room in ("images", "videos") for path in (Path(__file__).parents[1] / room).glob("*.py")]
    return [f"{path.parent.name}.{path.stem}" for path in sorted(found, key=lambda path: path.stem)]


BY_FILE: dict[str, list[Family]] = {
    name: getattr(importlib.import_module(f"support.families.{name}"), "FAMILIES", []) for name in _modules()
}
FAMILIES = [family for families in BY_FILE.values() for family in families]

ONE_OF_EACH = one_of_each(FAMILIES, lambda family: family.family)


def for_each(families: list[Family]) -> pytest.MarkDecorator:
    """Return the decorator of a slow test that gets each of these as `family`."""
    return pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow, id=family.name) for family in families])


some_families = for_each(sample(ONE_OF_EACH, 15))
