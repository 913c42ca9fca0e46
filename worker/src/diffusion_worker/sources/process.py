# SPDX-License-Identifier: Apache-2.0
"""The server's control of a process for one fetch or check: it is watched, and in the end always killed with its group."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.job import Checked, CheckJob, Event, FetchDone, FetchFailed, FetchJob, FetchProgress, Job

# Variables that a fetch inherits from its server. Not there: tokens and keys, which come from mounted Secrets, and proxies, which would
# connect to addresses that nobody checked.
INHERITED = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "TZ", "HF_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR")
# A library that looks into a home would find a user's tokens there. Arenas of malloc, and buffers of numpy, which comes with safetensors,
# are 64 MiB of address space or more for each thread.
OWN = {
    "HOME": "/nonexistent",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
}
MAX_LINE_BYTES = 1 << 20

# Called with the bytes received so far, and their total if known.
Report = Callable[[int, int | None], None]


async def fetch_in_process(job: FetchJob, report: Report, adopt: Callable[[FetchDone], None]) -> FetchDone:
    """Fetch in a child process, pass its progress to `report`, and return its result. The caller bounds its time.

    `adopt` gets the result too, in a thread, while the child still keeps the fetched files from eviction.

    Raises:
        RequestError: the error that the child reports; NetworkError if it makes no progress.
    """
    async with _answers(job) as lines:
        done = await _follow(lines, job, report)
        assert isinstance(done, FetchDone), "a fetch ends by this"
        await asyncio.to_thread(adopt, done)
    return done


async def check_in_process(job: CheckJob) -> str | None:
    """Check an adapter's file in a child process. Return the required digest, which the file has, or None if none is required.

    The caller bounds its time.

    Raises:
        RequestError: the error that the child reports; NetworkError if it dies.
    """
    async with _answers(job) as lines:
        checked = await _follow(lines, job, lambda done, total: None)
    assert isinstance(checked, Checked), "a check ends by this"
    return checked.digest


@contextlib.asynccontextmanager
async def _answers(job: Job) -> AsyncIterator[asyncio.StreamReader]:
    """Start a child process, give it a job, and yield the lines that it prints; at the end it is killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "diffusion_worker.sources",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in INHERITED if name in os.environ} | OWN,
        start_new_session=True,
        limit=MAX_LINE_BYTES,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        yield process.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _follow(lines: asyncio.StreamReader, job: Job, report: Report) -> FetchDone | Checked:
    """Read the child's events: pass progress to `report`, and return the outcome.

    Raises:
        RequestError: the error that the child reports; NetworkError if it dies, or its progress stands still for `stall_s`.
    """
    last: FetchProgress | None = None
    moved_at = time.monotonic()
    while True:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + moved_at + job.limits.stall_s - time.monotonic()):
                line = await lines.readline()
        except TimeoutError:
            message = f"{job.artifact}: its source made no progress for {job.limits.stall_s:g} s"
            raise RequestError(ErrorCode.NETWORK_ERROR, message) from None
        if not line:
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{job.artifact}: the process that reads it died")
        event: Event = msgspec.json.decode(line, type=Event)
        if isinstance(event, FetchDone | Checked):
            return event
        if isinstance(event, FetchFailed):
            raise RequestError(event.code, event.message)
        if event != last:
            last, moved_at = event, time.monotonic()
            report(event.done, event.total)
