# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of sources: adapters as bytes, a fetcher on a folder, the processes that it started, and an S3 server on loopback.

Real: the fetcher, its processes and its cache, and HTTP. Not real: tensors, which repeat one number, and S3. It is moto's, and checks
signatures for their form only.
"""

import asyncio
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx2
import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import RequestError
from diffusion_worker.sources.fetching import Fetched, Fetcher
from diffusion_worker.sources.job import FetchLimits
from diffusion_worker.sources.source import HttpSource, Source
from support.sources.servers import Served

DEADLINE_S = 120.0
PEFT_CONFIG = b'{"peft_type": "LORA", "r": 1}'
VERSIONING = b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>'


def adapter_bytes(size: int = 4000, *, fill: int = 1) -> bytes:
    """Return a minimal safetensors file: a LoRA factor `x.lora_A.weight` of `size` bytes, all equal to `fill`."""
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
        self._report = lambda done, total: self.progress.append((done, total))

    def secret(self, name: str, **keys: str) -> None:
        """Write each of `keys` of a Secret to a file in the folder of secrets, with a line feed at its end. Other keys that are there
        stay."""
        (self.secrets / name).mkdir(exist_ok=True)
        for key, value in keys.items():
            (self.secrets / name / key).write_text(f"{value}\n")

    async def adapter(self, source: Source, *, digest: str | None = None, deadline_s: float = DEADLINE_S) -> Fetched:
        """Fetch an adapter with this rig's fetcher, and add its progress to `progress`. A refusal raises RequestError."""
        return await self.fetcher.fetch_adapter(source, digest=digest, deadline_s=deadline_s, report=self._report, name="papercut")

    async def model(self, source: Source, **pin: str | None) -> Fetched:
        """Fetch a model with this rig's fetcher, within DEADLINE_S seconds. `pin` passes on a required `revision`, `digest` or both."""
        return await self.fetcher.fetch_model(source, deadline_s=DEADLINE_S, report=self._report, **pin)

    async def refusal(self, source: Source, **options: Any) -> RequestError:
        """Fetch an adapter that must be refused, and return the error; options as for `adapter`."""
        with pytest.raises(RequestError) as refused:
            await self.adapter(source, **options)
        return refused.value

    def files(self, folder: str) -> list[str]:
        """Return the sorted names of all files and folders directly in a subfolder of the cache."""
        return sorted(path.name for path in (self.cache / folder).iterdir())


def http_source(url: str, served: Served, path: str = "/a.safetensors") -> Source:
    """Return the source at `url` and `path`, with the right digest of the served file."""
    return Source(http=HttpSource(f"{url}{path}", served.sha256))


async def until(condition: Callable[[], object], *, deadline_s: float = 60.0) -> None:
    """Wait until `condition` is true, and raise TimeoutError after `deadline_s`. It is called every 10 ms."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def fetch_processes(parent: int | None = None) -> list[int]:
    """Search /proc for the direct children of `parent`, by default this process, whose command line names diffusion_worker.sources.
    Return their pids, perhaps none."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == (parent or os.getpid()) and b"diffusion_worker.sources" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


class S3Server(NamedTuple):
    """The address of a running S3 server. Test objects are uploaded as public, so the calls here are unsigned."""

    url: str

    def put(self, bucket: str, files: dict[str, bytes], *, versioned: bool = False) -> None:
        """Create a public bucket, with versioning if `versioned`, and upload `files`, a mapping of keys to contents.

        AssertionError if the server refuses a call.
        """
        self._send("PUT", f"/{bucket}")
        if versioned:
            self._send("PUT", f"/{bucket}?versioning", VERSIONING)
        for key, content in files.items():
            self._send("PUT", f"/{bucket}/{quote(key)}", content)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._send("DELETE", f"/{bucket}/{quote(key)}")

    def _send(self, method: str, path: str, body: bytes = b"") -> None:
        answer = httpx2.request(method, self.url + path, content=body, headers={"x-amz-acl": "public-read"}, timeout=10)
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text[:300]}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start an empty S3 server in a thread, provide its address, and stop it at the end of the block."""
    from moto.server import ThreadedMotoServer  # takes seconds, which most users of this file save

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    httpx2.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
    try:
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()
