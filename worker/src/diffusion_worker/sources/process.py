# SPDX-License-Identifier: Apache-2.0
"""The server's control of a fetching process: it is started for one job, watched, and in the end always killed with its group."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.job import Event, FetchDone, FetchFailed, FetchJob, FetchProgress

# Variables that a fetch inherits from its server. Not there: tokens and keys, which come from mounted Secrets, and proxies, which would
# connect to addresses that nobody checked.
INHERITED = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "TZ", "HF_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR")
# A library that looks into a home would find a user's tokens there; arenas of malloc are 64 MiB of address space for each thread.
OWN = {"HOME": "/nonexistent", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "MALLOC_ARENA_MAX": "2"}
MAX_LINE_BYTES = 1 << 20

# Called with the bytes received so far, and their total if known.
Report = Callable[[int, int | None], None]


async def fetch_in_process(job: FetchJob, report: Report, adopt: Callable[[FetchDone], None]) -> FetchDone:
    """Run a job in a child process; `adopt` is called in a thread while the child still keeps the fetched files from eviction.

    Raises:
        RequestError: the error that the child reports; NetworkError if it makes no progress; Timeout at its deadline.
    """
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
        async with asyncio.timeout(job.deadline_s):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            done = await _follow(process.stdout, job, report)
            await asyncio.to_thread(adopt, done)
        return done
    except TimeoutError:
        raise RequestError(ErrorCode.TIMEOUT, f"{job.what}: expected it to be fetched within {job.deadline_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _follow(lines: asyncio.StreamReader, job: FetchJob, report: Report) -> FetchDone:
    """Read the child's events: pass progress to `report`, and return the outcome; raises RequestError."""
    last: FetchProgress | None = None
    moved_at = time.monotonic()
    while True:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + moved_at + job.limits.stall_s - time.monotonic()):
                line = await lines.readline()
        except TimeoutError:
            why = f"no progress for {job.limits.stall_s:g} s"
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{job.what}: its source makes {why}") from None
        if not line:
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{job.what}: the process that fetches it died")
        event: Event = msgspec.json.decode(line, type=Event)
        if isinstance(event, FetchDone):
            return event
        if isinstance(event, FetchFailed):
            raise RequestError(event.code, event.message)
        if event != last:
            last, moved_at = event, time.monotonic()
            report(event.done, event.total)
