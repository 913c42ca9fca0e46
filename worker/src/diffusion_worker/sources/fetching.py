# SPDX-License-Identifier: Apache-2.0
"""Has sources brought here, for the server: local ones as they lie, others by a child process into the cache.

This is the server's side: it opens no connection, reads no secret and imports nothing heavy.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.in_place import claim_path, local_adapter, local_model
from diffusion_worker.sources.source import Source

# Bytes so far, and in all where that is known.
Report = Callable[[int, int | None], None]


class Fetched(msgspec.Struct, frozen=True):
    """Something that is on this machine now.

    `path` of an adapter is a safetensors file or a folder with one (and its adapter_config.json), of a model a folder.
    `digest` is that of the weights file of an adapter, `sha256:<hex>`, or of a model's whole folder; None where it was not
    computed on the way. `revision` is what the source calls this state of it: a commit, a version.
    """

    path: str
    digest: str | None = None
    revision: str | None = None
    size_bytes: int | None = None


class Fetcher:
    """Fetches for one server process. Use it on one event loop; any number of fetches may run at once."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    async def fetch_adapter(self, source: Source, *, digest: str | None, deadline_s: float, report: Report, name: str) -> Fetched:
        """Bring an adapter here, for `name` in messages. Its file stays until `release`, and while this process lives.

        Args:
            digest: what its weights file must have, as `sha256:<hex>`; one that is in the cache needs no network.
            report: called on the event loop as bytes arrive.

        Raises:
            RequestError: SourceNotFound, SourceUnauthorized, SecretMissing, NetworkError, TooLarge, CacheFull, DigestMismatch,
                UnsupportedFormat, InvalidAdapter, InvalidRequest, Timeout.
        """
        return await self._local(source, f"adapter {name!r}", local_adapter, deadline_s)

    async def fetch_model(self, source: Source, *, deadline_s: float, report: Report) -> Fetched:
        """Bring a model's folder here; it stays while this process lives. Raises RequestError as `fetch_adapter` does."""
        return await self._local(source, "model", local_model, deadline_s)

    def release(self, fetched: Fetched) -> None:
        """Nobody here reads this any more: from now on the cache may evict it. Harmless for what is not from the cache."""

    async def close(self) -> None:
        """End what still runs, and give the cache back."""

    async def _local(self, source: Source, what: str, look: Callable[..., Path], deadline_s: float) -> Fetched:
        try:
            async with asyncio.timeout(deadline_s):
                return Fetched(str(await asyncio.to_thread(self._look, source, what, look)))
        except TimeoutError:
            raise RequestError(ErrorCode.TIMEOUT, f"{what}: its folder did not answer within {deadline_s:g} s") from None

    def _look(self, source: Source, what: str, look: Callable[..., Path]) -> Path:
        """In a thread: a network file system may hang."""
        if source.pvc is not None:
            claim, path = claim_path(source.pvc, self._config.claims_dir)
            return look(path, f"{what}: claim {source.pvc.claim_name!r} path {source.pvc.path!r}", inside=claim)
        if source.path is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{what}: expected a source of kind path or pvc")
        return look(Path(source.path), f"{what}: {source.path}")
