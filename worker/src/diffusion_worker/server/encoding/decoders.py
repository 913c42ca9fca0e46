# SPDX-License-Identifier: Apache-2.0
"""Decoding of files for the server: a process for each file, killed alone when its time is over or its client has gone."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from diffusion_worker.config import usable_cores
from diffusion_worker.engine.requests.admission import InputImage
from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.errors import ErrorCode, RequestError, refused
from diffusion_worker.server.encoding.decode_job import Decoded, DecodeJob, Failed, Outcome, Refused
from diffusion_worker.server.encoding.input_images import DecodedImage

# Longest wall-clock time: a decoding beyond it was starved by others, as its own limits are far below.
DEADLINE_S = 60.0
START_S = 20.0
RETRY_S = 5.0
MAX_OUTCOME_BYTES = 65_536
# Variables that the process inherits, so that tokens and keys stay out of a process that reads clients' files.
INHERITED = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR")


class Decoders:
    """The decoding of clients' files: as many at once as there are usable cores, each in a process of its own. Further ones wait."""

    def __init__(self) -> None:
        self.waited, self.worked = Durations(), Durations()
        self._turns = asyncio.Semaphore(usable_cores())
        self._process: DecodingProcess | None = None

    async def decode(self, content: bytes, job: DecodeJob) -> DecodedImage:
        """Return the image of a file. A cancelled call kills the file's process.

        Raises:
            RequestError: InvalidRequest that names the field, for a file that cannot be used or takes over its time or memory.
                Busy, the machine has no time, or no decoder begins. EngineFailed, decoding cannot be confined, or gives too many pixels.
        """
        asked = time.monotonic()
        async with self._turns:
            began = time.monotonic()
            self.waited.observe(began - asked)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    return await self._decode(content, job)
            except TimeoutError:
                raise _busy(f"{job.field}: not decoded within {DEADLINE_S:g} s, as the machine is too busy; try again later") from None
            finally:
                self.worked.observe(time.monotonic() - began)

    async def _decode(self, content: bytes, job: DecodeJob) -> DecodedImage:
        if self._process is None or self._process.has_ended():
            self._process = DecodingProcess()
        parent = self._process
        reader, writer = await asyncio.open_unix_connection(sock=await asyncio.to_thread(parent.send, content, job))
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(START_S):
                    pid = int.from_bytes(await reader.readexactly(4))
            except (asyncio.IncompleteReadError, TimeoutError):
                parent.kill()
                raise _busy(f"{job.field}: no process of the worker began to decode it within {START_S:g} s; try again later") from None
            process = os.pidfd_open(pid)
            try:
                writer.write(b"!")
                return await _read(reader, job)
            except asyncio.IncompleteReadError:
                limits = f"{job.cpu_s} s of CPU time and {job.memory_mib} MiB"
                raise refused(job.field, f"an image that decodes within {limits}", "an image that takes more") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


class DecodingProcess:
    """The process that forks a process for each file. It ends with this object."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "diffusion_worker.server.encoding.decoding_process", str(theirs.fileno())]
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Return whether the process is gone, killed for memory for example."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and wait for its end; files that are being decoded already are not affected."""
        self._process.kill()
        self._process.wait()

    def send(self, content: bytes, job: DecodeJob) -> socket.socket:
        """Hand a file over; return the socket on which its outcome comes. If the process has ended, the socket is at its end at once."""
        ours, theirs = socket.socketpair()
        file = os.memfd_create("upload")
        try:
            with open(file, "wb", closefd=False) as written:
                written.write(content)
            with theirs, contextlib.suppress(OSError):  # the process has ended, so the outcome ends as well
                socket.send_fds(self._control, [msgspec.json.encode(job)], [file, theirs.fileno()])
        finally:
            os.close(file)
        return ours


async def _read(reader: asyncio.StreamReader, job: DecodeJob) -> DecodedImage:
    """Read an outcome and return its image. The process may be compromised, so more pixels than the job allows are refused.

    Raises:
        RequestError: InvalidRequest for a refused file; EngineFailed. asyncio.IncompleteReadError: the process ended early.
    """
    length = int.from_bytes(await reader.readexactly(4))
    outcome = msgspec.json.decode(await reader.readexactly(min(length, MAX_OUTCOME_BYTES)), type=Outcome)
    if isinstance(outcome, Refused):
        raise RequestError(ErrorCode.INVALID_REQUEST, outcome.message, details={"field": job.field})
    if isinstance(outcome, Failed):
        raise RequestError(ErrorCode.ENGINE_FAILED, outcome.why)
    return await _pixels(reader, outcome, job.max_pixels)


async def _pixels(reader: asyncio.StreamReader, outcome: Decoded, max_pixels: int) -> DecodedImage:
    height, width = outcome.height, outcome.width
    if not 0 < height * width <= max_pixels:
        raise RequestError(
            ErrorCode.ENGINE_FAILED, f"the decoding process returned an image of {width}x{height}, expected at most {max_pixels} pixels"
        )
    image = InputImage(await reader.readexactly(height * width * 3), height, width)
    mask = InputImage(await reader.readexactly(height * width), height, width, 1) if outcome.masked else None
    return DecodedImage(image, mask, outcome.file_height, outcome.file_width)


def _busy(message: str) -> RequestError:
    return RequestError(ErrorCode.BUSY, message, retry_after_s=RETRY_S)
