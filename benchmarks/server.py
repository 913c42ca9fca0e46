# SPDX-License-Identifier: Apache-2.0
"""P10: PNG against Pillow's own, the event loop while twenty images are encoded, and what the server process costs.

Encoding: images with a natural (1/f) spectrum of two roughness levels, both encoders in turn, in CPU time, which other
programs disturb less; the results are the worse image's. The loop: the real server over real HTTP, with `image_server` for
ranks; `/healthz` is asked all the time, without anything else to do and from the moment that twenty images of 1024x1024 are
handed to the server until twenty clients have them. Start and memory: the real worker with the digits model and its rank.
"""

import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.http_load import CLIENTS, HEALTH, ask, connect
from benchmarks.image_server import FOLDER_VARIABLE, image_name
from benchmarks.result import Measured
from diffusion_worker.server.encoding import OutputFormat, encode

DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "model"
SIZE = 1024
# Exponents of the spectrum: Pillow's default takes 1.9 and 0.8 MB for such images.
ROUGHNESS = {"rough": 1.4, "smooth": 1.95}
ENCODE_ROUNDS = 6
LOOP_ROUNDS = 16
IDLE_S = 0.5
# Between two questions, so that asking is not itself the load.
PAUSE_S = 0.002
STARTS = 5
IMAGES_BEFORE_MEMORY = 20
DEADLINE_S = 120.0
# How far apart both halves of a baseline may be before the machine counts as too busy.
NOISE = 0.10
LOOP_NOISE = 0.25
WHO = ("ours", "pillow")
LISTENING = re.compile(rb"listening data=\S+:(\d+)")


def measure() -> Measured:
    """All of it; the samples tell by their names what they are of."""
    images = {name: natural_image(exponent, seed) for seed, (name, exponent) in enumerate(ROUGHNESS.items())}
    encoded = [sample for name, image in images.items() for sample in _encode_rounds(name, image)]
    asked, peak_mb = _loop(list(images.values()))
    starts, resident_mb = _starts()
    idle, busy = ([sample["ms"] for sample in asked if sample["busy"] == wanted] for wanted in (0.0, 1.0))
    speedups, sizes = [], []
    results: dict[str, float] = {}
    for name in images:
        ours, theirs = (min(sample[f"{who}_cpu_s_{name}"] for sample in encoded if f"{who}_cpu_s_{name}" in sample) for who in WHO)
        speedups.append(theirs / ours)
        sizes.append(next(sample[f"size_ratio_{name}"] for sample in encoded if f"size_ratio_{name}" in sample))
        results |= {f"encode_ms_{name}": round(ours * 1000, 2), f"encode_speedup_{name}": round(theirs / ours, 2)}
    return Measured(
        results={
            "encode_speedup": round(min(speedups), 2),
            "size_ratio": round(max(sizes), 4),
            "loop_p99_ratio": round(_p99(busy) / _p99(idle), 3),
            "server_rss_mb": round(resident_mb, 1),
            "first_answer_s": round(statistics.median(start["first_answer_s"] for start in starts), 3),
            **results,
            "loop_idle_p99_ms": round(_p99(idle), 3),
            "loop_busy_p99_ms": round(_p99(busy), 3),
            "loop_idle_p50_ms": round(statistics.median(idle), 3),
            "loop_busy_p50_ms": round(statistics.median(busy), 3),
            "server_rss_peak_mb_of_twenty_at_once": round(peak_mb, 1),
            "first_answer_s_slowest": round(max(start["first_answer_s"] for start in starts), 3),
            # What of it is the server's own work, whoever else wants the cores.
            "first_answer_cpu_s": round(statistics.median(start["first_answer_cpu_s"] for start in starts), 3),
        },
        targets={
            "encode_speedup": ">= 20",
            "size_ratio": "<= 1.15",
            "loop_p99_ratio": "<= 2",
            "server_rss_mb": "<= 120",
            "first_answer_s": "<= 1",
        },
        samples=[*encoded, *asked, *starts],
    )


def natural_image(exponent: float, seed: int) -> bytes:
    """Rows of RGB bytes with a 1/f^exponent spectrum; the channels are mostly alike, as those of photographs are."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(SIZE)[:, None], np.fft.rfftfreq(SIZE)[None, :])
    frequency[0, 0] = 1.0
    channels = []
    for _ in range(3):
        waves = random.normal(size=frequency.shape) + 1j * random.normal(size=frequency.shape)
        plane = np.fft.irfft2(waves / frequency**exponent, (SIZE, SIZE))
        channels.append((plane - plane.mean()) / plane.std())
    mixed = [0.8 * channels[0] + 0.2 * plane for plane in channels]
    pixels: bytes = np.clip(np.stack(mixed, axis=-1) * 50 + 128, 0, 255).astype(np.uint8).tobytes()
    return pixels


def _encode_rounds(name: str, pixels: bytes) -> list[dict[str, float]]:
    image = Image.frombytes("RGB", (SIZE, SIZE), pixels)

    def by_pillow() -> bytes:
        out = io.BytesIO()
        image.save(out, format="PNG")
        return out.getvalue()

    def by_us() -> bytes:
        return encode(pixels, SIZE, SIZE, output_format=OutputFormat.PNG)

    ours, theirs = by_us(), by_pillow()
    if Image.open(io.BytesIO(ours)).tobytes() != pixels:
        raise RuntimeError(f"{name}: the PNG has other pixels than the image")
    rounds = []
    for number in range(ENCODE_ROUNDS):
        # In turn first and second, so that neither always finds the warmer cache.
        pair = list(zip(WHO, (by_us, by_pillow), strict=True))
        sample = {f"size_ratio_{name}": len(ours) / len(theirs)}
        for who, run in pair if number % 2 else pair[::-1]:
            sample |= _timed(f"{who}_cpu_s_{name}", run)
        rounds.append(sample)
    _require_calm(f"Pillow on the {name} image", [sample[f"pillow_cpu_s_{name}"] for sample in rounds], min, NOISE)
    return rounds


def _timed(name: str, run: Callable[[], bytes]) -> dict[str, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    run()
    return {name: time.thread_time() - cpu, name.replace("_cpu_s_", "_s_"): time.perf_counter() - wall}


# The event loop


def _loop(images: list[bytes]) -> tuple[list[dict[str, float]], float]:
    """What every question took, and the server's largest resident memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        for number, pixels in enumerate(images):
            (Path(folder) / image_name(number, SIZE)).write_bytes(pixels)
        options = ("--max-batch-size", str(CLIENTS), "--warmup-steps", "0", "--max-pixels", str(SIZE * SIZE))
        with _server("benchmarks.image_server", options, env={FOLDER_VARIABLE: folder}) as (process, port):
            _wait_ready(port)
            command = [sys.executable, "-m", "benchmarks.http_load", str(port), str(SIZE)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as clients:
                asked = _questions(process, port, clients)
                assert clients.stdin is not None
                clients.stdin.close()
            return asked, _status_mb(process.pid, "VmHWM")


def _questions(process: subprocess.Popen[bytes], port: int, clients: subprocess.Popen[str]) -> list[dict[str, float]]:
    assert clients.stdin is not None and clients.stdout is not None
    asked: list[dict[str, float]] = []
    with connect(port) as connection:
        for number in range(LOOP_ROUNDS + 1):
            idle = list(_ask_until(connection, _after(IDLE_S)))
            process.send_signal(signal.SIGUSR1)  # hold the images back
            print("burst", file=clients.stdin, flush=True)
            _expect(clients, "waiting")
            process.send_signal(signal.SIGUSR1)  # hand them out
            busy = list(_ask_until(connection, lambda: _has_line(clients)))
            _expect(clients, "done")
            # The first burst meets cold code and an empty heap.
            if number:
                asked += [{"round": number, "busy": 0.0, "ms": ms} for ms in idle]
                asked += [{"round": number, "busy": 1.0, "ms": ms} for ms in busy]
    _require_calm("the idle server", [sample["ms"] for sample in asked if not sample["busy"]], statistics.median, LOOP_NOISE)
    return asked


def _after(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def _ask_until(connection: socket.socket, over: Callable[[], bool]) -> Iterator[float]:
    while not over():
        started = time.perf_counter()
        ask(connection, HEALTH)
        yield (time.perf_counter() - started) * 1000
        time.sleep(PAUSE_S)


def _has_line(clients: subprocess.Popen[str]) -> bool:
    assert clients.stdout is not None
    return bool(select.select([clients.stdout], [], [], 0)[0])


def _expect(clients: subprocess.Popen[str], word: str) -> None:
    assert clients.stdout is not None
    if not select.select([clients.stdout], [], [], DEADLINE_S)[0] or clients.stdout.readline().strip() != word:
        raise RuntimeError(f"the clients did not say {word!r} within {DEADLINE_S:g} s")


# The process


def _starts() -> tuple[list[dict[str, float]], float]:
    """What every start took to its first answer, and the last one's resident memory in MB after some images."""
    starts, resident_mb = [], 0.0
    for number in range(STARTS):
        started = time.perf_counter()
        with _server("diffusion_worker.cli", ()) as (process, port):
            with connect(port) as connection:
                ask(connection, HEALTH)
            starts.append({"first_answer_s": time.perf_counter() - started, "first_answer_cpu_s": _cpu_seconds(process.pid)})
            if number == STARTS - 1:
                _wait_ready(port)
                for _ in range(IMAGES_BEFORE_MEMORY):
                    _make_image(port)
                resident_mb = _status_mb(process.pid, "VmRSS")
    return starts, resident_mb


@contextlib.contextmanager
def _server(module: str, options: tuple[str, ...], env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process on free ports, from the moment it says where it listens."""
    command = [sys.executable, "-m", module, "serve", f"--model={DIGITS}", "--host=127.0.0.1", "--port=0", "--control-port=0", *options]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})})
        try:
            yield process, _port(process, output.fileno())
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def _port(process: subprocess.Popen[bytes], output: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = LISTENING.search(os.pread(output, 65_536, 0))
        if found:
            return int(found[1])
        time.sleep(0.002)
    raise RuntimeError(f"the server does not listen: {os.pread(output, 65_536, 0)[-500:].decode(errors='replace')}")


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=DEADLINE_S):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server is not ready within {DEADLINE_S:g} s")


def _make_image(port: int) -> None:
    body = json.dumps({"prompt": "a red digit seven", "num_inference_steps": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/images/generations", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read()


def _status_mb(pid: int, field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/status has no {field}")
    return int(found[1]) / 1024


def _cpu_seconds(pid: int) -> float:
    """User and system time of the process alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def _require_calm(what: str, samples: list[float], typical: Callable[[list[float]], float], noise: float) -> None:
    halves = typical(samples[: len(samples) // 2]), typical(samples[len(samples) // 2 :])
    apart = max(halves) / min(halves) - 1
    if apart > noise:
        raise RuntimeError(f"{what}: rounds of the baseline differ by {apart:.0%}, more than {noise:.0%}: the machine is too busy")
