# SPDX-License-Identifier: Apache-2.0
"""Images as files: the same pixels, metadata and fast encoding, with threads that neither pile up nor delay a step."""

import asyncio
import io
import json
import os
import random
import struct
import subprocess
import sys
import threading
import zlib
from typing import Any

import pytest
from PIL import Image, ImageChops

from diffusion_worker.engine.state.request_events import AppliedAdapter, FinishedImage, Provenance
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import Task
from diffusion_worker.server.encoding.images import BAND_BYTES, OutputFormat, encode, metadata_of
from diffusion_worker.server.encoding.threads import MAX_THREADS, NICENESS, EncodingThreads
from diffusion_worker.server.schemas import answers
from support.worker.server_edge import DEADLINE_S, serving_edge

PROVENANCE = Provenance(
    model="digits",
    pipeline="StableDiffusion3Pipeline",
    revision="v1",
    digest="sha256:" + "0" * 64,
    task=Task.INPAINT,
    strength=0.5,
    adapters=[AppliedAdapter("Zoë's stripes", "sha256:" + "1" * 64, 0.5, "v1:" + "2" * 64)],
    steps=10,
    guidance_scale=4.5,
    accelerated=False,
    exact=True,
    engine="0.1.0",
)
ROWS_OF_A_BAND = BAND_BYTES // (3 * 64)


def pixels_of(height: int, width: int) -> bytes:
    """Make random rows of RGB bytes that resemble real images: octaves of noise, each half as strong as the next coarser one."""
    image = Image.new("L", (width * 3, height), 128)
    for octave in range(7):
        scale = 2 ** (6 - octave)
        noise = Image.effect_noise((max(1, width * 3 // scale), max(1, height // scale)), 2 * scale**0.9)
        image = ImageChops.add(image, noise.resize(image.size, Image.Resampling.BICUBIC), 1, -128)
    return image.tobytes()


def opened(file: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(file))
    image.load()
    return image


def png_chunks(file: bytes) -> list[tuple[bytes, bytes]]:
    """Split a PNG into the kind and content of each chunk, and assert that its signature and checksums are right."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(file):
        length, kind = struct.unpack(">I4s", file[at : at + 8])
        content = file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        chunks.append((kind, content))
        at += 12 + length
    return chunks


def read_png(file: bytes) -> bytes:
    """Return the pixels of a PNG whose rows have the filter Up, read with the standard library alone."""
    chunks = png_chunks(file)
    width = struct.unpack(">II", chunks[0][1][:8])[0]
    data = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    above, rows = bytes(width * 3), []
    for start in range(0, len(data), width * 3 + 1):
        assert data[start] == 2
        above = bytes((value + up) % 256 for value, up in zip(data[start + 1 : start + 1 + width * 3], above, strict=True))
        rows.append(above)
    return b"".join(rows)


@pytest.mark.parametrize(
    ("height", "width"),
    [(1, 1), (1, 7), (9, 1), (2, 3), (33, 17), (ROWS_OF_A_BAND, 64), (ROWS_OF_A_BAND + 1, 64), (ROWS_OF_A_BAND + 2, 64)],
)
def test_a_png_has_the_same_pixels(height: int, width: int) -> None:
    pixels = random.Random(0).randbytes(height * width * 3)
    file = encode(memoryview(pixels), height, width, output_format=OutputFormat.PNG)
    image = opened(file)
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (width, height))
    assert image.tobytes() == pixels
    # The second reader is slow, so it reads small images only.
    if len(pixels) < 10_000:
        assert read_png(file) == pixels


def test_a_png_with_rows_wider_than_a_band_has_the_same_pixels() -> None:
    width = BAND_BYTES // 3 + 5
    pixels = random.Random(0).randbytes(3 * width * 3)
    assert opened(encode(pixels, 3, width, output_format=OutputFormat.PNG)).tobytes() == pixels


def test_a_png_is_made_of_chunks_with_right_checksums_in_their_order() -> None:
    kinds = [kind for kind, _ in png_chunks(encode(bytes(600 * 200 * 3), 600, 200, output_format=OutputFormat.PNG, metadata={"a": 1}))]
    assert kinds[:2] == [b"IHDR", b"iTXt"] and kinds[-1] == b"IEND"
    assert set(kinds[2:-1]) == {b"IDAT"} and len(kinds) > 4


def test_a_png_is_hardly_larger_than_pillows() -> None:
    size = 256
    pixels, by_pillow = pixels_of(size, size), io.BytesIO()
    Image.frombytes("RGB", (size, size), pixels).save(by_pillow, format="PNG")
    # The benchmark P10 has the speed.
    assert len(encode(pixels, size, size, output_format=OutputFormat.PNG)) / len(by_pillow.getvalue()) < 1.15


@pytest.mark.parametrize(("output_format", "most"), [(OutputFormat.WEBP, 16_383), (OutputFormat.JPEG, 65_500)])
def test_a_side_that_a_format_cannot_have_is_refused_by_name_and_a_png_takes_it(output_format: OutputFormat, most: int) -> None:
    assert opened(encode(bytes(3 * most), 1, most, output_format=output_format)).size == (most, 1)
    for height, width in ((1, most + 1), (most + 1, 1)):
        pixels = bytes(3 * (most + 1))
        with pytest.raises(
            RequestError, match=f"output_format: expected at most {most} pixels a side for {output_format}, found {width}x{height}"
        ):
            encode(pixels, height, width, output_format=output_format)
        assert opened(encode(pixels, height, width, output_format=OutputFormat.PNG)).size == (width, height)


async def test_a_size_that_the_format_cannot_have_is_refused_before_the_image_is_made() -> None:
    async with serving_edge() as edge:
        answer = await edge.request_images(prompt="p kumquatfen", size="16384x64", output_format="webp")
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
            400,
            "InvalidRequest",
            "output_format",
        )
        assert edge.engine.stats.ticks == 0


@pytest.mark.parametrize("output_format", [OutputFormat.JPEG, OutputFormat.WEBP])
def test_compression_is_the_quality_of_jpeg_and_webp(output_format: OutputFormat) -> None:
    pixels = pixels_of(96, 64)
    files = [encode(pixels, 96, 64, output_format=output_format, compression=quality) for quality in (0, 50, 100)]
    assert len(files[0]) < len(files[1]) < len(files[2])
    for file in files:
        image = opened(file)
        assert (image.format, image.size) == (output_format.upper(), (64, 96))
    assert len(encode(pixels, 96, 64, output_format=output_format)) < len(files[2])


def test_the_metadata_of_an_image_is_all_that_is_needed_to_make_it_again_but_its_prompt() -> None:
    image = FinishedImage(pixels=b"", height=48, width=64, seed=7)
    assert metadata_of(PROVENANCE, image) == {
        "model": "digits",
        "pipeline": "StableDiffusion3Pipeline",
        "revision": "v1",
        "digest": "sha256:" + "0" * 64,
        "task": "inpaint",
        "strength": 0.5,
        "adapters": [{"name": "Zoë's stripes", "digest": "sha256:" + "1" * 64, "scale": 0.5, "identity": "v1:" + "2" * 64}],
        "steps": 10,
        "guidance_scale": 4.5,
        "accelerated": False,
        "exact": True,
        "engine": "0.1.0",
        "sigmas": None,
        "shift": None,
        "seed": 7,
        "width": 64,
        "height": 48,
    }


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_the_metadata_can_be_read_back_from_every_file(output_format: OutputFormat) -> None:
    metadata = metadata_of(PROVENANCE, FinishedImage(pixels=b"", height=8, width=16, seed=2**63 - 1))
    image = opened(encode(pixels_of(8, 16), 8, 16, output_format=output_format, metadata=metadata))
    found = image.text["provenance"] if output_format is OutputFormat.PNG else image.getexif()[0x010E]
    assert json.loads(found) == metadata


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_a_file_without_metadata_has_none(output_format: OutputFormat) -> None:
    image = opened(encode(pixels_of(8, 16), 8, 16, output_format=output_format))
    assert not image.getexif() and not getattr(image, "text", {})


FORBIDDEN = """
import sys
import diffusion_worker.cli, diffusion_worker.ranks.executor, diffusion_worker.server.serve
from diffusion_worker.server.encoding.images import OutputFormat, encode
for each in OutputFormat:
    encode(bytes(3 * 64), 8, 8, output_format=each, metadata={"a": 1})
print(*sorted({"numpy", "torch", "diffusers", "safetensors", "PIL.PsdImagePlugin"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_the_server_process_encodes_every_format_without_numpy_torch_and_the_formats_it_has_no_use_for() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


async def test_many_images_at_once_share_a_few_threads_that_run_behind_the_loop() -> None:
    threads = EncodingThreads()
    assert 1 <= threads.threads <= min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
    few = EncodingThreads(2)
    running, most, lock, nice = 0, 0, threading.Lock(), set()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        encode(bytes(3 * 64 * 64), 64, 64, output_format=OutputFormat.PNG)
        with lock:
            running -= 1
        return number

    before = os.getpriority(os.PRIO_PROCESS, 0)
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*(few.run(work, number) for number in range(50))) == list(range(50))
    assert most <= 2 and few.pending == 0
    assert nice == {min(19, before + NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert [sum(1 for _ in each.cumulative()) > 0 and list(each.cumulative())[-1][1] for each in (few.waited, few.worked)] == [50, 50]


async def test_work_that_nobody_waits_for_any_more_is_never_begun() -> None:
    one = EncodingThreads(1)
    gate, begun = threading.Event(), []
    first = asyncio.create_task(one.run(gate.wait, DEADLINE_S))
    second = asyncio.create_task(one.run(begun.append, "second"))
    third = asyncio.create_task(one.run(begun.append, "third"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await first
        await third
    assert begun == ["third"]


async def test_an_error_in_a_thread_is_that_of_whoever_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        await EncodingThreads(1).run(lambda: 1 // 0)


class SlowEncoder:
    """An image encoder that waits until a test sets `gate`; `begun` counts its calls. It replaces the server's for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.begun = 0
        monkeypatch.setattr(answers, "encode", self._encode)

    def _encode(self, *image: Any, **options: Any) -> bytes:
        self.begun += 1
        assert self.gate.wait(DEADLINE_S), "nobody let the encoder go"
        return encode(*image, **options)


async def test_a_slow_encoder_delays_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SlowEncoder(monkeypatch)
    async with serving_edge() as edge:
        first = asyncio.create_task(edge.request_images(prompt="one kumquatfen"))
        await edge.wait_for(lambda: reached(encoder.begun == 1))
        others = [asyncio.create_task(edge.request_images(prompt=str(number), num_inference_steps=20)) for number in range(8)]
        # All steps of the other requests run while not a single file is written.
        await edge.wait_for(lambda: reached(edge.engine.stats.images == 9))
        assert not any(task.done() for task in (first, *others))
        encoder.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert {answer.status_code for answer in await asyncio.gather(first, *others)} == {200}


async def test_no_image_is_lost_that_is_being_encoded_when_the_worker_sleeps_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SlowEncoder(monkeypatch)
    async with serving_edge() as edge:
        before_sleep = asyncio.create_task(edge.request_images(prompt="one kumquatfen"))
        await edge.wait_for(lambda: reached(encoder.begun == 1))
        await edge.operate("sleep")
        await edge.wait_state(state="asleep")
        await edge.operate("wake")
        await edge.wait_state(state="ready")
        before_end = asyncio.create_task(edge.request_images(prompt="two kumquatfen"))
        await edge.wait_for(lambda: reached(edge.engine.stats.images == 2))
        async with asyncio.timeout(DEADLINE_S):
            await edge.engine.terminate()
            encoder.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(before_sleep, before_end)] == [200, 200]


async def reached(condition: bool) -> bool:
    return condition
