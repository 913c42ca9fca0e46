# SPDX-License-Identifier: Apache-2.0
"""Files of clients, decoded in confined processes that end alone at their limits; a busy machine is another error."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.encoding.decode_job import DecodeJob
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.input_images import MAX_SCANS, claimed_size, decode, scans_of
from support.encoding.hostile_images import many_scans

JOB = DecodeJob(field="image", max_pixels=4096)
# An image whose decoding ends at no speed of the machine; see `endless`.
ENDLESS = "endless"
CONFINED = "from diffusion_worker.server.encoding.decoding_process import confine; confine(cpu_s=1, memory_bytes=64 << 20); "


def jpeg(width: int, height: int, *, scans: int = 0, mode: str = "L", **saved: object) -> bytes:
    """Return a grey progressive JPEG of this size; its last scan is repeated until it has `scans` scans."""
    out = io.BytesIO()
    Image.new(mode, (width, height), "grey").save(out, "JPEG", progressive=True, **saved)
    return many_scans(out.getvalue(), scans)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), "red").save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the decoding process compute for ever where a job's field is ENDLESS. Fake: the file's cost; real: process, limits, signals."""
    (tmp_path / "sitecustomize.py").write_text(
        "from diffusion_worker.server.encoding import input_images\n"
        "real = input_images.decode\n"
        "def decode(field, content, **options):\n"
        f"    while field == {ENDLESS!r}:\n"
        "        pass\n"
        "    return real(field, content, **options)\n"
        "input_images.decode = decode\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


async def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        await asyncio.sleep(0.02)


def children(decoders: Decoders) -> list[str]:
    """Return the ids of the child processes of the decoders' process: those that decode a file at this moment."""
    assert decoders._process is not None
    pid = decoders._process._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("content", [png(48, 32), png(48, 32, "RGBA"), jpeg(48, 32, mode="RGB"), png(300, 200)])
async def test_an_image_is_the_same_as_decoded_here(content: bytes) -> None:
    assert await Decoders().decode(content, JOB) == decode("image", content, max_pixels=4096)


@pytest.mark.parametrize(
    "content",
    [png(300, 200), jpeg(300, 200), jpeg(300, 200, mode="RGB", exif=b"Exif\0\0" + bytes(9000), icc_profile=bytes(200_000), comment="c")],
)
def test_the_size_of_an_image_is_read_from_its_header(content: bytes) -> None:
    assert claimed_size("image", content) == (300, 200)


def test_a_jpeg_without_an_end_of_small_segments_is_left_to_the_decoder_at_once() -> None:
    assert claimed_size("image", b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2_000) is None


async def test_a_jpeg_of_too_many_scans_is_refused_by_their_number() -> None:
    decoders = Decoders()
    content = jpeg(64, 64, scans=800)
    with pytest.raises(RequestError, match=f"image: expected a JPEG of at most {MAX_SCANS} scans, found 800 scans") as raised:
        await decoders.decode(content, JOB)
    assert raised.value.code == ErrorCode.INVALID_REQUEST
    assert (await decoders.decode(jpeg(64, 64, scans=MAX_SCANS), JOB)).width == 64


def test_scans_are_counted_in_the_image_and_not_in_its_metadata() -> None:
    plain = jpeg(64, 64)
    assert scans_of(jpeg(64, 64, comment=b"\xff\xda" * 30_000)) == scans_of(plain) > 1
    assert [scans_of(plain[:length]) <= scans_of(plain) for length in range(0, len(plain), 7)]


@pytest.mark.slow
async def test_a_file_that_takes_more_than_its_seconds_is_refused_and_costs_nobody_else_anything(endless: None) -> None:
    decoders = Decoders()
    slow = asyncio.create_task(decoders.decode(png(48, 32), msgspec.structs.replace(JOB, field=ENDLESS, cpu_s=1)))
    assert (await decoders.decode(png(48, 32), JOB)).width == 48
    message = "endless: expected an image that decodes within 1 s of CPU time and 1024 MiB, found an image that takes more"
    with pytest.raises(RequestError, match=message):
        await slow


async def test_a_file_that_takes_more_than_its_memory_is_refused() -> None:
    with pytest.raises(RequestError, match="expected an image that decodes within 16 MiB, found an image that takes more"):
        await Decoders().decode(png(4000, 2400), msgspec.structs.replace(JOB, memory_bytes=16 << 20))


async def test_a_decode_whose_client_has_gone_is_ended(endless: None) -> None:
    decoders = Decoders()
    await decoders.decode(png(48, 32), JOB)
    decoding = asyncio.create_task(decoders.decode(png(48, 32), msgspec.structs.replace(JOB, field=ENDLESS, cpu_s=60)))
    await until(lambda: len(children(decoders)) == 1)
    decoding.cancel()
    await asyncio.gather(decoding, return_exceptions=True)
    await until(lambda: children(decoders) == [])


async def test_a_decoding_process_that_was_killed_is_started_again() -> None:
    decoders = Decoders()
    await decoders.decode(png(48, 32), JOB)
    assert decoders._process is not None
    os.kill(decoders._process._process.pid, signal.SIGKILL)
    await until(lambda: decoders._process is not None and decoders._process.has_ended())
    assert (await decoders.decode(png(48, 32), JOB)).width == 48


async def test_a_decoding_process_that_does_not_begin_is_busy_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = Decoders()
    await decoders.decode(png(48, 32), JOB)
    assert decoders._process is not None
    os.kill(decoders._process._process.pid, signal.SIGSTOP)
    monkeypatch.setattr("diffusion_worker.server.encoding.decoders.START_S", 0.3)
    with pytest.raises(RequestError, match=r"no process of the worker began to decode it within 0\.3 s") as raised:
        await decoders.decode(png(48, 32), JOB)
    assert (raised.value.code, raised.value.retryable) == (ErrorCode.BUSY, True)
    monkeypatch.undo()
    assert (await decoders.decode(png(48, 32), JOB)).width == 48


# The limit of processes does not bind root, so as root the test takes the user that Linux has for nobody.
ORDINARY_USER = "os.getuid() == 0 and os.setuid(65534); "


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        ("socket.socket()", "[Errno 24] Too many open files"),
        ("open('/etc/passwd')", "[Errno 24] Too many open files"),
        ("os.fork()", "BlockingIOError: [Errno 11] Resource temporarily unavailable"),
        ("subprocess.run(['/bin/true'])", "[Errno 24] Too many open files"),
        ("threading.Thread(target=print).start()", "can't start new thread"),
    ],
)
def test_a_confined_process_opens_and_starts_nothing(attempt: str, refused: str) -> None:
    script = f"import os, socket, subprocess, threading; {CONFINED}{ORDINARY_USER}{attempt}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert refused in ended.stderr


def test_a_confined_process_computes() -> None:
    ended = subprocess.run([sys.executable, "-c", f"{CONFINED}print(sum(range(9)))"], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("36\n", 0)
