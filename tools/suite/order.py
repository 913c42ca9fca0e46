# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: where several processes share the tests, the files that take longest come first.

pytest-xdist would take the files with the most tests first. A long file of few tests would then come last, and the other process
would have nothing to do. The seconds are in `tests/seconds.json`, which `python -m tools.suite.page` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

SECONDS = Path(__file__).parents[2] / "tests" / "seconds.json"


def file_of(name: str) -> str:
    """Return the file in a test's id: the part before `::`."""
    return name.partition("::")[0]


def longest_first(files: list[str], seconds: Mapping[str, float]) -> list[str]:
    """Sort files by their recorded seconds, longest first. A file without a record precedes all others, as it may be the longest."""
    return sorted(files, key=lambda file: -seconds.get(file, float("inf")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests by their files, those that take longest first, in a worker process of pytest-xdist.

    In other processes, or without recorded seconds, do nothing. `--dist loadfile --no-loadscope-reorder` hands out files in that order.
    """
    if not hasattr(config, "workerinput") or not SECONDS.exists():
        return
    files = list(dict.fromkeys(file_of(item.nodeid) for item in items))
    place = {file: number for number, file in enumerate(longest_first(files, json.loads(SECONDS.read_text())))}
    items.sort(key=lambda item: place[file_of(item.nodeid)])
