# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of sources: adapters as bytes, a fetcher on a folder, and the processes that it started.

Real: the fetcher, its processes and its cache. Not real: the tensors of an adapter, which are one number over and over.
"""

import asyncio
import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import RequestError
from diffusion_worker.sources.fetching import Fetched, Fetcher
from diffusion_worker.sources.job import FetchLimits
from diffusion_worker.sources.source import HttpSource, Source
from support.sources.servers import Served

DEADLINE_S = 30.0
PEFT_CONFIG = b'{"peft_type": "LORA", "r": 1}'


def adapter_bytes(size: int = 4000, *, fill: int = 1) -> bytes:
    """A safetensors file of one tensor of so many bytes."""
    header = json.dumps({"x.lora_A.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * size


class SourceRig:
    """A fetcher for one cache, with folders for secrets and claims beside it."""

    def __init__(self, folder: Path, *, limits: FetchLimits | None = None, **options: object) -> None:
        self.cache, self.secrets, self.claims = (folder / name for name in ("cache", "secrets", "claims"))
        for place in (self.cache, self.secrets, self.claims):
            place.mkdir(exist_ok=True)
        places = {"cache_dir": str(self.cache), "secrets_dir": str(self.secrets), "claims_dir": str(self.claims)}
        settings = {"model": "/none", "served_name": "none", "allow_http_sources": True, **places, **options}
        self.config = WorkerConfig(**settings)  # type: ignore[arg-type]
        self.fetcher = Fetcher(self.config, limits=limits)
        self.progress: list[tuple[int, int | None]] = []

    def secret(self, name: str, **keys: str) -> None:
        """Mount a Secret."""
        (self.secrets / name).mkdir(exist_ok=True)
        for key, value in keys.items():
            (self.secrets / name / key).write_text(f"{value}\n")

    async def adapter(self, source: Source, *, digest: str | None = None, deadline_s: float = DEADLINE_S) -> Fetched:
        """Fetch it."""
        return await self.fetcher.fetch_adapter(source, digest=digest, deadline_s=deadline_s, report=self._report, name="papercut")

    async def model(self, source: Source, **pin: str | None) -> Fetched:
        """Fetch it; `pin` is a revision, a digest or both."""
        return await self.fetcher.fetch_model(source, deadline_s=DEADLINE_S, report=self._report, **pin)

    async def refusal(self, source: Source, **options: Any) -> RequestError:
        """The error that a fetch of an adapter ends with; options as for `adapter`."""
        with pytest.raises(RequestError) as refused:
            await self.adapter(source, **options)
        return refused.value

    def files(self, folder: str) -> list[str]:
        """Names in a folder of the cache."""
        return sorted(path.name for path in (self.cache / folder).iterdir())

    def _report(self, done: int, total: int | None) -> None:
        self.progress.append((done, total))


def http_source(url: str, served: Served, path: str = "/a.safetensors") -> Source:
    """What is served at an address, with its right digest."""
    return Source(http=HttpSource(f"{url}{path}", served.sha256))


async def until(condition: Callable[[], object], *, deadline_s: float = 60.0) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def fetch_processes(parent: int | None = None) -> list[int]:
    """The processes that fetch for a process, this one by default."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == (parent or os.getpid()) and b"diffusion_worker.sources" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
