# SPDX-License-Identifier: Apache-2.0
"""A fetch from beginning to end, in its own process: the listing, the parts already here, the rest, and the header."""

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import read_header
from diffusion_worker.sources.downloading import Downloader, RemoteFile, Totals, bring_all
from diffusion_worker.sources.file_cache import Blob, FileCache, Record, key_of
from diffusion_worker.sources.job import ArtifactKind, FetchDone, FetchJob
from diffusion_worker.sources.plain_http import http_digest, resolve_http
from diffusion_worker.sources.resolving import ResolveContext, Resolved
from diffusion_worker.sources.selection import ADAPTER_WEIGHTS
from diffusion_worker.sources.source import HuggingFaceSource, S3Source, Source
from diffusion_worker.sources.transport import checked_client

COMMIT = re.compile(r"[0-9a-f]{40}")
# At these errors of its source a model is loaded as it was fetched last.
UNREACHABLE = frozenset({ErrorCode.NETWORK_ERROR, ErrorCode.SOURCE_NOT_FOUND})


def fetch(job: FetchJob, report: Callable[[int, int | None], None], leases: ExitStack) -> FetchDone:
    """Fetch a job's model or adapter into the cache; its files cannot be evicted until `leases` is closed.

    If a model's source is not reached or found and no revision is required, the version fetched last is returned, if it is cached.

    Raises:
        RequestError: see `Fetcher.fetch_adapter`.
    """
    cache = FileCache(Path(job.cache_dir), limit_bytes=job.cache_bytes)
    pinned = _pinned(job)
    if (known := _known(job, cache, pinned, leases)) is not None:
        return known
    with checked_client(allow_http=job.allow_http, reach=job.reach, read_timeout_s=job.limits.stall_s / 2) as client:
        question = ResolveContext(
            client=client,
            wanted=job.wanted,
            artifact=job.artifact,
            secrets=Path(job.secrets_dir),
            allow_http=job.allow_http,
            reach=job.reach,
            deadline_s=job.deadline_s,
        )
        try:
            resolved = _pin(resolve(_at_revision(job), question), pinned)
        except RequestError as error:
            last = _recorded(job, cache, "last", leases) if job.revision is None and job.wanted is ArtifactKind.MODEL else None
            if last is None or error.code not in UNREACHABLE:
                raise
            return msgspec.structs.replace(last, note=f"revision {last.revision}, fetched before, is used, because of: {error.message}")
        moved = job.revision not in (None, resolved.revision)
        if moved and job.digest is None:
            raise _moved(job, resolved, "possibly another model, as no digest was given to compare")
        totals = Totals(report, {file.identity: file.size for file in resolved.files.values()})
        if totals.total is not None and totals.total > job.max_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE, f"{job.artifact}: expected at most {job.max_bytes} bytes in all files, found {totals.total}"
            )
        downloader = Downloader(client, cache, max_bytes=job.max_bytes, stall_s=job.limits.stall_s, totals=totals)
        with totals:
            blobs = bring_all(downloader, resolved.files, leases)
    done = _finish(job, cache, resolved, blobs)
    if not moved:
        return done
    if done.digest != job.digest:
        raise _moved(job, resolved, "another model, as its digest differs")
    return msgspec.structs.replace(
        done,
        revision=job.revision,
        note=f"the source's revision {resolved.revision} has the same bytes as the expected {job.revision} and is used",
    )


def resolve(source: Source, question: ResolveContext) -> Resolved:
    """Find the wanted files of a remote source and their addresses, without a download; raise RequestError, also for a path or a claim.

    The library of a kind is imported only for a source of that kind.
    """
    if source.http is not None:
        return resolve_http(source.http, question)
    if source.hugging_face is not None:
        from diffusion_worker.sources.hub import resolve_hub

        return resolve_hub(source.hugging_face, question)
    if source.s3 is not None:
        from diffusion_worker.sources.s3 import resolve_s3

        return resolve_s3(source.s3, question)
    raise RequestError(
        ErrorCode.INVALID_REQUEST,
        f"{question.artifact}: expected huggingFace, s3 or http, found a path or a claim, from which nothing is downloaded",
    )


def _pinned(job: FetchJob) -> str | None:
    """Return the digest that an adapter's weights must have, in hex; None if any digest is right, and for a model.

    Raises:
        RequestError: DigestMismatch if the job and its http source name two digests; InvalidRequest for a malformed one.
    """
    pinned = job.digest.lower().removeprefix("sha256:") if job.digest and job.wanted is ArtifactKind.ADAPTER else None
    if job.source.http is None:
        return pinned
    named = http_digest(job.source.http)
    if pinned not in (None, named):
        raise RequestError(
            ErrorCode.DIGEST_MISMATCH, f"{job.artifact}: expected sha256:{pinned}, found that its source names sha256:{named}"
        )
    return named


def _pin(resolved: Resolved, pinned: str | None) -> Resolved:
    """Require the pinned digest of the weights; raise RequestError (DigestMismatch) if the source already states another."""
    if pinned is None:
        return resolved
    weights = resolved.files[ADAPTER_WEIGHTS]
    if weights.sha256 not in (None, pinned):
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"{weights.label}: expected sha256:{pinned}, found sha256:{weights.sha256}")
    files: dict[str, RemoteFile] = {**resolved.files, ADAPTER_WEIGHTS: msgspec.structs.replace(weights, sha256=pinned)}
    return msgspec.structs.replace(resolved, files=files)


def _at_revision(job: FetchJob) -> Source:
    """Return the source at the required revision, if its kind has one: a hub keeps every commit, a bucket only its current state."""
    hub = job.source.hugging_face
    if hub is None or job.revision is None:
        return job.source
    return Source(hugging_face=msgspec.structs.replace(hub, revision=job.revision))


def _moved(job: FetchJob, resolved: Resolved, verdict: str) -> RequestError:
    found = f"expected revision {job.revision}, found {resolved.revision} at the source"
    return RequestError(ErrorCode.DIGEST_MISMATCH, f"{job.artifact}: {found}, {verdict}")


def _known(job: FetchJob, cache: FileCache, pinned: str | None, leases: ExitStack) -> FetchDone | None:
    """Return cached content that needs no network: of a pinned digest or revision, or of a commit, which never changes; else None."""
    if job.revision is not None:
        return _recorded(job, cache, job.revision, leases)
    if pinned is not None:
        if (found := _recorded(job, cache, pinned, leases)) is not None:
            return found
        size = cache.size(pinned)
        if _is_single(job.source) and size is not None:
            return _done(job, cache, Record({ADAPTER_WEIGHTS: Blob(pinned, size)}), leases)
        return None
    hub = job.source.hugging_face
    return _recorded(job, cache, "last", leases) if hub is not None and COMMIT.fullmatch(hub.revision) else None


def _is_single(source: Source) -> bool:
    """Return whether a source names a single file."""
    hub: HuggingFaceSource | None = source.hugging_face
    s3: S3Source | None = source.s3
    return source.http is not None or (hub is not None and hub.file is not None) or (s3 is not None and not s3.uri.endswith("/"))


def _recorded(job: FetchJob, cache: FileCache, state: str, leases: ExitStack) -> FetchDone | None:
    """Return a state of the source that was fetched before; None if it was not, or if a file of it is evicted."""
    record = cache.read_record(_state_key(job, state))
    return _done(job, cache, record, leases) if record is not None else None


def _done(job: FetchJob, cache: FileCache, record: Record, leases: ExitStack) -> FetchDone | None:
    blobs = {blob.sha256: blob.size for blob in record.files.values()}
    lease = cache.lease(blobs)
    if lease is None:
        return None
    leases.callback(lease.close)
    folder, digest = cache.tree(record.files)
    if job.wanted is ArtifactKind.ADAPTER:
        digest = record.files[ADAPTER_WEIGHTS].sha256
        folder = folder if len(record.files) > 1 else folder / ADAPTER_WEIGHTS
    return FetchDone(str(folder), f"sha256:{digest}", record.revision, sum(blobs.values()), list(blobs))


def _finish(job: FetchJob, cache: FileCache, resolved: Resolved, blobs: dict[str, Blob]) -> FetchDone:
    """Finish a fetch: check an adapter's header, record the state of the source, and return the result. Raises RequestError."""
    if job.wanted is ArtifactKind.ADAPTER:
        read_header(cache.blob(blobs[ADAPTER_WEIGHTS].sha256), name=job.name)
    record = Record(blobs, resolved.revision)
    lasting = blobs[ADAPTER_WEIGHTS].sha256 if job.wanted is ArtifactKind.ADAPTER else resolved.revision
    for state in ("last", lasting) if lasting is not None else ("last",):
        cache.write_record(_state_key(job, state), record)
    with ExitStack() as briefly:  # the caller holds leases on all of them already
        done = _done(job, cache, record, briefly)
    if done is None:
        raise RequestError(ErrorCode.CACHE_FULL, f"{job.artifact}: its files were evicted from the cache while they were fetched")
    return done


def _state_key(job: FetchJob, state: str) -> str:
    """Return the record's key for one state of a source, the same for every Secret that the source is read with."""
    source = msgspec.to_builtins(job.source)
    for kind in source.values():
        kind.pop("tokenSecretRef", None)
        kind.pop("credentialsSecretRef", None)
    hub = os.environ.get("HF_ENDPOINT", "")
    return key_of("state", job.wanted, hub, msgspec.json.encode(source, order="sorted").decode(), state)
