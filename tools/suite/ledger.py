# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: with `--ledger=PATH` each test process writes what its tests cost to `PATH.PROCESS.json`."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest


class TestCost(msgspec.Struct):
    """The cost of one test, fixtures and their ends included.

    `seconds` are by the wall clock. `cpu_s` is the processor time of the test's process, and of its child processes that
    ended meanwhile. So a shared worker counts for the test that ends it.
    """

    __test__ = False  # not a test, although its name begins so

    name: str
    seconds: float
    cpu_s: float


class ProcessCost(msgspec.Struct):
    """Measurements of one test process and of its tests. Times are Unix times in seconds; `cpu_s` is processor time."""

    name: str
    began: float
    collected: float
    ended: float
    cpu_s: float
    tests: list[TestCost]


class Ledger:
    """A pytest plugin that notes the cost of every test of its process, and writes all to a file at the session's end."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._cost = ProcessCost(name, _process_began(), 0.0, 0.0, 0.0, [])

    def pytest_collection_finish(self) -> None:
        """Note the time at which the tests were collected."""
        self._cost.collected = time.time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a test with its fixtures, and note its seconds and processor time, also if it fails."""
        began, cpu_s = time.time(), _cpu_s()
        try:
            return (yield)
        finally:
            self._cost.tests.append(TestCost(item.nodeid, time.time() - began, _cpu_s() - cpu_s))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Note the end of the process, and write its costs to `PATH.PROCESS.json`."""
        self._cost.ended, self._cost.cpu_s = time.time(), _cpu_s()
        self._path.with_name(f"{self._path.name}.{self._cost.name}.json").write_bytes(msgspec.json.encode(self._cost))


def read(folder: Path, stage: str) -> list[ProcessCost]:
    """Return the costs of the test processes of a stage that the folder has, in the order of file names.

    Processes without tests are left out.
    """
    costs = [msgspec.json.decode(path.read_bytes(), type=ProcessCost) for path in sorted(folder.glob(f"{stage}.*.json"))]
    return [cost for cost in costs if cost.tests]


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _process_began() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--ledger` to pytest."""
    parser.addoption("--ledger", metavar="PATH", help="write what each test cost to PATH.PROCESS.json")


def pytest_configure(config: pytest.Config) -> None:
    """Register a Ledger for this process if `--ledger` is given; the main process first removes the files of an earlier run."""
    if not (option := config.getoption("--ledger")):
        return
    path, process = Path(option), getattr(config, "workerinput", {}).get("workerid", "main")
    if process == "main":
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.name}.*.json"):
            old.unlink()
    config.pluginmanager.register(Ledger(path, process))
