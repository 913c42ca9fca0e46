# SPDX-License-Identifier: Apache-2.0
"""A container registry for a test: the program that the development cluster's node has, on a free port and in a folder."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

from support.ports import unused_port
from tools.devcluster import processes, programs

START_S = 20.0


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run a container registry that keeps its images in `folder`, and provide its `host:port` once it answers. It is stopped after the
    block."""
    address, log = f"127.0.0.1:{unused_port()}", folder / "registry.log"
    settings = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}}, "http": {"addr": address}}
    (folder / "registry.json").write_text(json.dumps(settings))
    words = [programs.debian() / "usr/bin/docker-registry", "serve", folder / "registry.json"]
    running = processes.start("registry", words, log=log, dies_with_us=True)
    try:
        end = time.monotonic() + START_S
        while not _answers(address):
            assert time.monotonic() < end and running.alive(), log.read_text()[-2000:]
            time.sleep(0.05)
        yield address
    finally:
        running.stop()


def _answers(address: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"http://{address}/v2/", timeout=2).is_success
    return False
