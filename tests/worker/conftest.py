# SPDX-License-Identifier: Apache-2.0
"""Real workers that tests share: a start costs ten seconds of importing torch. Tests that break a worker start their own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources.servers import SourceServer
from support.worker.process import DIGITS, WorkerProcess


@pytest.fixture(scope="session")
def bad_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provide folders that are no adapter of the digits model, by the fault of each."""
    # The import of torch is left to the tests that need it.
    from support.lora.adapters import make_bad_adapters

    return make_bad_adapters(tmp_path_factory.mktemp("bad-adapters"), like=DIGITS / "loras" / "stripes")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Provide an empty folder for a worker's temporary files: a socket's path has at most 107 characters, and `tmp_path` may be longer."""
    with tempfile.TemporaryDirectory(prefix="worker-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def worker(bad_adapters: dict[str, Path]) -> Iterator[WorkerProcess]:
    """Start a worker with one rank, the digits model, two adapters and a broken one. A test must leave it awake and with these adapters."""
    loras = {"stripes": DIGITS / "loras" / "stripes", "frame": DIGITS / "loras" / "frame", "broken": bad_adapters["no-config"]}
    with WorkerProcess(loras=loras) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture(scope="session")
def worker_of_two(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """Start a worker with two ranks, the digits model and one adapter, after `worker`: two cores cannot start both at once."""
    with WorkerProcess(ranks=2, loras={"stripes": DIGITS / "loras" / "stripes"}) as two:
        two.wait_ready()
        yield two


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceServer]:
    """Start an empty hub on loopback and let this process fetch from it."""
    server = SourceServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with server.running():
        yield server
