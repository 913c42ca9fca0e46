# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: tests that share something stay in one process, and what takes longest comes first.

pytest-xdist takes the files with the most tests first. A long file of few tests would then come last, and the other process
would have nothing to do. Here the order is by the seconds in `tests/seconds.json`, which `python -m tools.suite.page` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

SECONDS = Path(__file__).parents[2] / "tests" / "seconds.json"
# Tests of these folders have a test family as their only parameter, and those of one family share its tiny pipelines.
BY_PARAMETER = ("tests/worker/families/every/",)


def unit_of(name: str) -> str:
    """Return the part of the suite that stays in one process with this test: its file, or all tests of its family."""
    file = name.partition("::")[0]
    if file.startswith(BY_PARAMETER) and "[" in name:
        return file.rpartition("/")[0] + "/" + name[name.index("[") :]
    return file


@cache
def recorded_seconds() -> Mapping[str, float]:
    """Return how long each unit took when it was last recorded."""
    found: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return found


def longest_first(units: list[str], seconds: Mapping[str, float]) -> list[str]:
    """Return the units in the order of their seconds; those that nobody has recorded yet come first."""
    return sorted(units, key=lambda unit: -seconds.get(unit, float("inf")))


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole units in the order in which the tests are collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests of several processes into the order in which they are handed out."""
    if not hasattr(config, "workerinput"):
        return
    units = list(dict.fromkeys(unit_of(item.nodeid) for item in items))
    place = {unit: number for number, unit in enumerate(longest_first(units, recorded_seconds()))}
    items.sort(key=lambda item: place[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LongestFirst | None:
    """Take the order of collection, not xdist's by number of tests."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return LongestFirst(config, log)
