# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: where several processes share the tests, the files that took longest the last time on this machine come first.

pytest-xdist would take the files with the most tests first. A long file of few tests would then come last, and the other process
would have nothing to do. The plugin works with `--dist loadfile --no-loadscope-reorder`, and else does nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.devcluster.paths import cache_dir

NAME = "seconds of each file's tests"


def longest_first(files: list[str], seconds: Mapping[str, float]) -> list[str]:
    """Sort files by their recorded seconds, longest first. A file without a record precedes all others, as it may be the longest."""
    return sorted(files, key=lambda file: -seconds.get(file, float("inf")))


class Record:
    """The seconds of each file's tests in this run and in those before, which the processes of pytest-xdist read at their start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a process that is about to start the same record as all others, since all must find one order."""
        node.workerinput[NAME] = self._before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a test, of its fixtures or of their ends."""
        self._seconds[_file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the seconds over those of earlier runs, without files that no longer exist."""
        kept = {
            file: round(seconds, 1) for file, seconds in (self._before | self._seconds).items() if (session.config.rootpath / file).exists()
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(kept))
        draft.rename(self._path)


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Keep a record in the main process of such a run."""
    if not hasattr(config, "workerinput") and not config.getoption("loadscopereorder", True):
        config.pluginmanager.register(Record(cache_dir() / "suite" / "seconds.json"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests by their files, those that took longest first, in a worker process of pytest-xdist."""
    if not (seconds := getattr(config, "workerinput", {}).get(NAME)):
        return
    files = list(dict.fromkeys(_file_of(item.nodeid) for item in items))
    place = {file: number for number, file in enumerate(longest_first(files, seconds))}
    items.sort(key=lambda item: place[_file_of(item.nodeid)])
