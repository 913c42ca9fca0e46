# SPDX-License-Identifier: Apache-2.0
"""The process of one fetch or check: a job on its standard input, progress and the outcome on its standard output.

The process is bounded in memory and time, and ends with its parent. It keeps the fetched files from eviction until its input ends.
"""

import ctypes
import os
import resource
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.job import Checked, CheckJob, Event, FetchFailed, FetchJob, FetchProgress, Job

PR_SET_PDEATHSIG = 1
# Seconds beyond the deadline, so that the server ends a fetch first and reports the reason.
MORE_S = 30


def main() -> None:
    """Read a job from standard input, run it, print its progress and outcome, and keep its files leased until the input ends."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    _bound(job)
    with ExitStack() as leases:
        tell(_outcome(job, leases))
        # The server takes its own lease before it ends our input.
        sys.stdin.buffer.read()


def tell(event: Event) -> None:
    """Report an event to the parent process, as a line of JSON on standard output, and flush it."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def _outcome(job: Job, leases: ExitStack) -> Event:
    try:
        # Imported late, so that the limits hold for the libraries too.
        if isinstance(job, CheckJob):
            from diffusion_worker.sources.unread_adapter import check_unread

            root = None if job.root is None else Path(job.root)
            return Checked(check_unread(Path(job.path), root=root, digest=job.digest, name=job.name))
        from diffusion_worker.sources.running import fetch

        return fetch(job, lambda done, total: tell(FetchProgress(done, total)), leases)
    except RequestError as error:
        # The refusal of a host or scheme comes from the HTTP client, which does not know the job: name it here.
        return FetchFailed(error.code, error.message if error.message.startswith(job.artifact) else f"{job.artifact}: {error.message}")
    except MemoryError:
        return FetchFailed(
            ErrorCode.TOO_LARGE, f"{job.artifact}: the process that reads it needs more memory than {job.limits.memory_bytes} bytes"
        )
    except Exception as error:
        if isinstance(error, OSError) and isinstance(job, FetchJob):
            return FetchFailed(
                ErrorCode.CACHE_FULL, f"{job.artifact}: the cache {job.cache_dir} cannot be read or written: {error.strerror}"
            )
        # The error's text is left out: it may hold a secret.
        return FetchFailed(
            ErrorCode.NETWORK_ERROR, f"{job.artifact}: the process that reads it failed unexpectedly ({type(error).__name__})"
        )


def _bound(job: Job) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent_pid:
        sys.exit(1)  # the parent died before the call above
    # Address space is not bounded: the library of safetensors maps a whole file for a moment, however large, to read its header.
    resource.setrlimit(resource.RLIMIT_DATA, (job.limits.memory_bytes, job.limits.memory_bytes))
    cpu_s = MORE_S + int(job.deadline_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The server ends this process at the deadline; the timer serves if the server itself is suspended.
    signal.setitimer(signal.ITIMER_REAL, job.deadline_s + MORE_S)


if __name__ == "__main__":
    main()
