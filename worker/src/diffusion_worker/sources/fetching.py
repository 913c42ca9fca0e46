# SPDX-License-Identifier: Apache-2.0
"""The server's side of fetching sources: local ones are used in place, a child process checks them or fetches the others into the cache.

This side opens no connection, reads no secret and imports nothing heavy.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.file_cache import FileCache, Lease
from diffusion_worker.sources.in_place import FileStamp, adapter_stamps, claim_path, local_adapter, local_model
from diffusion_worker.sources.job import ArtifactKind, CheckJob, FetchDone, FetchJob, FetchLimits
from diffusion_worker.sources.parsing import is_remote
from diffusion_worker.sources.process import Report, check_in_process, fetch_in_process
from diffusion_worker.sources.source import Source

log = logging.getLogger(__name__)

# Processes that fetch or check at once; one is some 40 MB, mostly libraries.
MAX_PROCESSES = 4


class Fetched(msgspec.Struct, frozen=True):
    """An adapter or model that is on this machine.

    `path` is an adapter's safetensors file or its folder with one (and adapter_config.json), or a model's folder. `digest` is the
    `sha256:<hex>` of an adapter's weights file or of a model's whole folder; None if it was not computed. `revision` is the source's
    name for this state: a commit, a version. With a `root` nothing outside that folder may be read, wherever links lead. `stamps`
    are those of an adapter's files that are read in place.
    """

    path: str
    digest: str | None = None
    revision: str | None = None
    size_bytes: int | None = None
    root: str | None = None
    stamps: tuple[FileStamp, ...] = ()

    def may_differ(self, earlier: "Fetched") -> bool:
        """Return whether path, digest, revision or stamps differ from an earlier fetch of the source, so that the content may differ."""
        return (self.path, self.digest, self.revision, self.stamps) != (earlier.path, earlier.digest, earlier.revision, earlier.stamps)


class Fetcher:
    """Access to sources for a server process: it locates local ones, and starts a child process for each of the others.

    An instance belongs to one event loop. At most `MAX_PROCESSES` children run at a time; more fetches wait within their deadlines. Files
    stay leased until `release` or `close`.
    """

    def __init__(self, config: WorkerConfig, *, limits: FetchLimits | None = None) -> None:
        self._config = config
        self._limits = limits or FetchLimits()
        self._running = asyncio.Semaphore(MAX_PROCESSES)
        self._private: str | None = None
        self._leases: dict[str, list[Lease]] = {}

    async def fetch_adapter(
        self, source: Source, *, digest: str | None, deadline_s: float, report: Report, name: str, public_only: bool = False
    ) -> Fetched:
        """Fetch an adapter, which messages call `name`. The file stays until it is released, or this process ends.

        An adapter at a path or on a claim is only located: `check_adapter` reads it and checks its digest.

        Args:
            digest: the required digest of a remote weights file, as `sha256:<hex>`; a cached file needs no network.
            report: called on the event loop as bytes arrive.
            public_only: the addresses that the source names must be global.

        Raises:
            RequestError: SourceNotFound, SourceUnauthorized, SecretMissing, NetworkError, TooLarge, CacheFull, DigestMismatch,
                UnsupportedFormat, InvalidAdapter, InvalidRequest, Timeout.
        """
        if not is_remote(source):
            return await self._local(source, f"adapter {name!r}", local_adapter, deadline_s)
        job = self._job(source, ArtifactKind.ADAPTER, digest=digest, deadline_s=deadline_s, name=name)
        return await self._remote(msgspec.structs.replace(job, public_only=public_only), report)

    async def check_adapter(self, fetched: Fetched, *, digest: str | None, deadline_s: float, name: str) -> Fetched:
        """Check the file of an adapter in place before any rank reads it, and return it with the required digest, if there is one.

        An adapter that was downloaded is returned as it is: it was checked on its way.

        Raises:
            RequestError: InvalidAdapter, UnsupportedFormat, DigestMismatch, SourceNotFound, Timeout.
        """
        if fetched.digest is not None:
            return fetched
        job = CheckJob(
            parent_pid=os.getpid(),
            path=fetched.path,
            root=fetched.root,
            name=name,
            digest=digest,
            deadline_s=deadline_s,
            # Hashing tells nothing before its end.
            limits=msgspec.structs.replace(self._limits, stall_s=deadline_s),
        )
        try:
            async with asyncio.timeout(deadline_s), self._running:
                found = await check_in_process(job)
        except TimeoutError:
            raise RequestError(ErrorCode.TIMEOUT, f"adapter {name!r}: its file was not read within {deadline_s:g} s") from None
        return msgspec.structs.replace(fetched, digest=found)

    async def fetch_model(
        self, source: Source, *, deadline_s: float, report: Report, revision: str | None = None, digest: str | None = None
    ) -> Fetched:
        """Fetch a model's folder, which stays while this process lives. Raises RequestError as `fetch_adapter` does.

        A model at a path or on a claim is only located, whatever `revision` and `digest` are. If a remote source is not
        reached or found and no `revision` is required, the version that was fetched last is returned.

        Args:
            revision: the required revision, as an earlier fetch found it; a cached one needs no network.
            digest: the folder's digest at that revision. A source that has moved on is accepted if its content still has this digest.
        """
        if not is_remote(source):
            return await self._local(source, "model", local_model, deadline_s)
        return await self._remote(self._job(source, ArtifactKind.MODEL, digest=digest, revision=revision, deadline_s=deadline_s), report)

    def release(self, fetched: Fetched) -> None:
        """End one use of a fetched file or folder; after the last one the cache may evict it. Does nothing for one used where it lies."""
        leases = self._leases.get(fetched.path, [])
        if leases:
            leases.pop().close()
        if not leases:
            self._leases.pop(fetched.path, None)

    async def close(self) -> None:
        """Release all files, and remove the cache if it is private to this process. Call it when no fetch runs any more."""
        for leases in self._leases.values():
            for lease in leases:
                lease.close()
        self._leases.clear()
        if self._private is not None:
            folder, self._private = self._private, None
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _job(
        self, source: Source, wanted: ArtifactKind, *, digest: str | None, deadline_s: float, revision: str | None = None, name: str = ""
    ) -> FetchJob:
        config = self._config
        return FetchJob(
            parent_pid=os.getpid(),
            source=source,
            wanted=wanted,
            name=name,
            digest=digest,
            revision=revision,
            deadline_s=deadline_s,
            cache_dir=self._cache_dir(),
            cache_bytes=config.cache_size_bytes,
            secrets_dir=config.secrets_dir,
            allow_http=config.allow_http_sources,
            public_only=False,
            limits=self._limits,
        )

    def _cache_dir(self) -> str:
        """Return the shared cache folder, or else a private one of this process, created when first needed."""
        if self._config.cache_dir is not None:
            return self._config.cache_dir
        if self._private is None:
            self._private = tempfile.mkdtemp(prefix="diffusion-cache-")
        return self._private

    async def _remote(self, job: FetchJob, report: Report) -> Fetched:
        try:
            async with asyncio.timeout(job.deadline_s), self._running:
                done = await fetch_in_process(job, report, lambda done: self._adopt(job, done))
        except TimeoutError:
            raise RequestError(ErrorCode.TIMEOUT, f"{job.artifact}: not fetched within {job.deadline_s:g} s") from None
        if done.note is not None:
            log.warning("fetch of %s: %s", job.artifact, done.note)
        log.info("%s fetched digest=%s revision=%s bytes=%d", job.artifact, done.digest, done.revision, done.size_bytes)
        return Fetched(done.path, done.digest, done.revision, done.size_bytes, root=job.cache_dir)

    def _adopt(self, job: FetchJob, done: FetchDone) -> None:
        """Take a lease on fetched files, before the fetching process gives up its own; raise RequestError (CacheFull) if one is gone."""
        lease = FileCache(Path(job.cache_dir)).lease(dict.fromkeys(done.blobs))
        if lease is None:
            raise RequestError(ErrorCode.CACHE_FULL, f"{job.artifact}: its files were removed from the cache while they were fetched")
        self._leases.setdefault(done.path, []).append(lease)

    async def _local(self, source: Source, label: str, look: Callable[..., Path], deadline_s: float) -> Fetched:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.to_thread(self._look, source, label, look)
        except TimeoutError:
            raise RequestError(ErrorCode.TIMEOUT, f"{label}: its folder did not answer within {deadline_s:g} s") from None

    def _look(self, source: Source, label: str, look: Callable[..., Path]) -> Fetched:
        """Find a local adapter or model by `look`, on a claim or at a path, and stamp an adapter's files.

        It blocks for as long as a network file system does, so threads call it.
        """
        if source.pvc is not None:
            claim, path = claim_path(source.pvc, self._config.claims_dir)
            if not claim.is_dir():
                expected = f"expected it to be mounted at {claim}, found nothing there"
                raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{label}: claim {source.pvc.claim_name!r}: {expected}")
            found = look(path, f"{label}: claim {source.pvc.claim_name!r} path {source.pvc.path!r}", inside=claim)
            return Fetched(str(found), root=str(claim), stamps=_stamps(look, found, label, claim))
        assert source.path is not None, "only a path is left"
        found = look(Path(source.path), f"{label}: {source.path}")
        return Fetched(str(found), stamps=_stamps(look, found, label, None))


def _stamps(look: Callable[..., Path], found: Path, label: str, root: Path | None) -> tuple[FileStamp, ...]:
    """Return the stamps of an adapter's files, taken before a reader opens them, so that a write meanwhile counts; none for a model."""
    return adapter_stamps(found, label, root=root) if look is local_adapter else ()
