# SPDX-License-Identifier: Apache-2.0
"""The process that decodes: it has Pillow in memory, and forks a process for each file, which never decodes another one.

`python -m diffusion_worker.server.encoding.decoding_process FD` takes jobs from the socket FD, each with the file and a socket for its
outcome. It ends when the server closes the other end. The process of a file sends its pid, by which the server may kill it. It waits for
a byte of the server before it begins, so the pid is still its own when the server opens it.
"""

import contextlib
import fcntl
import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from PIL import Image

from diffusion_worker.errors import RequestError
from diffusion_worker.server.encoding.decode_job import Decoded, DecodeJob, Failed, Outcome, Refused
from diffusion_worker.server.encoding.input_images import DecodedImage, decode, mask_by_luminance

# Lower priority than that of the event loop, the ranks and encoding.
NICENESS = 10
MAX_JOB_BYTES = 4096


def main() -> None:
    """Take jobs from the socket of the command line and fork a process for each, until the server closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended processes
    large = os.memfd_create("large")
    _import_all()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_JOB_BYTES, 2)
        if not message:
            return
        # If no process can be forked, the server reads the end of the outcome, and answers Busy.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                file, answer = descriptors
                _answer(msgspec.json.decode(message, type=DecodeJob), file, answer, large)
        for descriptor in descriptors:
            os.close(descriptor)


def _import_all() -> None:
    """Decode a small image of each format, since Pillow imports modules on the way and a confined process cannot."""
    for format_ in ("PNG", "JPEG", "WEBP"):
        out = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGBA" if format_ != "JPEG" else "RGB", (8, 8), "red").save(out, format_, exif=exif)
        decode("image", out.getvalue(), max_pixels=16)


def _answer(job: DecodeJob, file: int, answer: int, large: int) -> None:
    """Send this process's pid, wait for the server's byte, decode the file, send the outcome, and end this process.

    If the server closes the socket instead, nothing is decoded. The call never returns.
    """
    try:
        os.write(answer, os.getpid().to_bytes(4))
        if os.read(answer, 1):
            with open(answer, "wb") as outcome:
                outcome.writelines(_parts(job, file, large))
    finally:
        os._exit(0)


def _parts(job: DecodeJob, file: int, large: int) -> list[bytes]:
    """Decode a job's file, and return the outcome as it is sent: its length, the outcome itself, and the pixels if there are any."""
    outcome, pixels = _decoded(job, file, large)
    header = msgspec.json.encode(outcome)
    return [len(header).to_bytes(4), header, *pixels]


def _decoded(job: DecodeJob, file: int, large: int) -> tuple[Outcome, list[bytes]]:
    try:
        confine(cpu_s=job.cpu_s, memory_bytes=job.memory_bytes)
    except (OSError, ValueError) as error:
        return Failed(f"the process that decodes images cannot limit itself: {error}"), []
    try:
        content = os.pread(file, os.lseek(file, 0, os.SEEK_END), 0)
        found = decode(job.field, content, max_pixels=job.max_pixels, large=_turn_of_the_large(large))
        mask = mask_by_luminance(found.image) if job.as_mask and found.mask is None else found.mask
    except RequestError as error:
        return Refused(error.message), []
    except MemoryError:
        return Refused(f"{job.field}: expected an image that decodes within {job.memory_mib} MiB, found an image that takes more"), []
    return _outcome(found, mask is not None), [found.image.pixels, *([mask.pixels] if mask is not None else [])]


def confine(*, cpu_s: int, memory_bytes: int) -> None:
    """Let the kernel end this process after `cpu_s` of CPU time, and refuse it more than `memory_bytes` beyond its current memory.

    From now on it opens no file and no socket. It starts no process either, unless its user is root, whom that limit does not bind.

    Raises:
        OSError, ValueError: the process has a lower hard limit.
    """
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (has + memory_bytes, has + memory_bytes))
    for none_of in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        resource.setrlimit(none_of, (0, 0))


def _outcome(found: DecodedImage, masked: bool) -> Decoded:
    return Decoded(found.height, found.width, found.image.height, found.image.width, masked)


@contextlib.contextmanager
def _turn_of_the_large(large: int) -> Iterator[None]:
    """Hold the lock for large files while entered; it also ends with this process."""
    fcntl.lockf(large, fcntl.LOCK_EX)
    yield


if __name__ == "__main__":
    main()
