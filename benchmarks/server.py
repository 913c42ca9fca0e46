# SPDX-License-Identifier: Apache-2.0
"""P10: PNG against Pillow's own, the event loop while twenty images are encoded, and what the server process costs.

Encoding: images with a natural (1/f) spectrum of two roughness levels, in CPU time, which other programs disturb less; the results
are the worse image's. The loop: the real server over real HTTP, with `image_server` for ranks. `/healthz` is asked all the time, before,
during and after a burst. A burst lasts from the moment that twenty images of 1024x1024 are handed to the server until twenty clients have
them. Start and memory: the real worker with the digits model and its rank.
"""

import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmarks.lines import end, next_line
from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Taking, Times
from benchmarks.result import Measured
from benchmarks.server_process import DEADLINE_S, cpu_seconds, make_image, server, status_mb, wait_ready
from benchmarks.stand_ins.http_load import HEALTH, ask, connect
from benchmarks.stand_ins.image_server import DIGITS, image_name
from benchmarks.stand_ins.natural_image import encoding_pairs, natural_image

# Exponents of the spectrum: Pillow's default takes 1.9 and 0.8 MB for such images.
ROUGHNESS = {"rough": 1.4, "smooth": 1.95}
# Between two questions, so that asking is not itself the load.
PAUSE_S = 0.002
TARGETS = {
    "encode_speedup": ">= 20",
    "size_ratio": "<= 1.15",
    "loop_p99_ratio": "<= 2",
    "server_rss_mb": "<= 120",
    "first_answer_s": "<= 1",
}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: pixels of an image's side, seconds of each idle half, and starts of the worker.

    `images` are made before its memory is read. `encoding` and `loop` are the plans for the pairs of the two comparisons.
    """

    side: int = 1024
    idle_s: float = 0.4
    starts: int = 5
    images: int = 20
    encoding: Plan = Plan(within_s=60)
    # Medians of a hundred answers of a millisecond.
    loop: Plan = Plan(wanted=16, at_most=48, noise=0.25, within_s=120)


TINY = Size(side=64, idle_s=0.05, starts=1, images=1, encoding=TINY_PLAN, loop=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Measure the PNG encoder, the event loop under a burst of images, and the start and memory of the server process.

    Samples of all these are in one list.
    """
    size = TINY if tiny else Size()
    images = {name: natural_image(exponent, seed, size.side) for seed, (name, exponent) in enumerate(ROUGHNESS.items())}
    encoded = {name: encoding_pairs(name, image, size.side, size.encoding) for name, image in images.items()}
    loop, asked, peak_mb = _loop(list(images.values()), size)
    starts, resident_mb = _starts(size)
    figures = {
        "encode_speedup": min(1 / pairs.ratio() for pairs, _ in encoded.values()),
        "size_ratio": max(size_ratio for _, size_ratio in encoded.values()),
        "server_rss_mb": resident_mb,
        "first_answer_s": statistics.median(start["first_answer_s"] for start in starts),
        **{f"encode_ms_{name}": pairs.ours("thread_s") * 1000 for name, (pairs, _) in encoded.items()},
        **{f"encode_speedup_{name}": 1 / pairs.ratio() for name, (pairs, _) in encoded.items()},
        **_loop_figures(loop, asked),
        "server_rss_peak_mb_of_twenty_at_once": peak_mb,
        "first_answer_s_slowest": max(start["first_answer_s"] for start in starts),
        # The server's own part of it, without the time that others take from the cores.
        "first_answer_cpu_s": statistics.median(start["first_answer_cpu_s"] for start in starts),
    }
    pairs = [*(pairs for pairs, _ in encoded.values()), loop]
    samples = [sample for each in pairs for sample in each.samples()] + asked + starts
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, samples, pairs)


def _loop_figures(loop: Pairs, asked: list[dict[str, float]]) -> dict[str, float]:
    """Return the median and the 99th percentile of the answers' milliseconds, idle and busy, and the ratio of busy to idle 99th percentile.

    All questions in `asked` that belong to a used pair of `loop` count: the hundred answers of a single pair have too short a tail.
    """
    used = {pair.number for pair in loop.used}
    idle, busy = ([one["ms"] for one in asked if one["pair"] in used and one["busy"] == wanted] for wanted in (0.0, 1.0))
    return {
        "loop_p99_ratio": _p99(busy) / _p99(idle),
        "loop_idle_p99_ms": _p99(idle),
        "loop_busy_p99_ms": _p99(busy),
        "loop_idle_p50_ms": statistics.median(idle),
        "loop_busy_p50_ms": statistics.median(busy),
    }


# The event loop


def _loop(images: list[bytes], size: Size) -> tuple[Pairs, list[dict[str, float]], float]:
    """Time clients' questions to the stand-in server, both while it idles and while it encodes `images`.

    Returns the pairs, each question's time in ms, and the server's peak resident memory in MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, pixels in enumerate(images):
            (Path(folder) / image_name(number, size.side)).write_bytes(pixels)
        with server([sys.executable, "-m", "benchmarks.stand_ins.image_server", folder, str(size.side)]) as (process, port):
            wait_ready(process, port)
            command = [sys.executable, "-m", "benchmarks.stand_ins.http_load", str(port), str(size.side)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as clients:
                try:
                    pairs, asked = _questions(process, port, clients, size)
                finally:
                    end(clients, within_s=10)
            return pairs, asked, status_mb(process.pid, "VmHWM")


def _questions(
    process: subprocess.Popen[bytes], port: int, clients: subprocess.Popen[str], size: Size
) -> tuple[Pairs, list[dict[str, float]]]:
    """Take pairs of a burst between two idle times, judged by the median answer; return them and the milliseconds of every question.

    A first burst is not counted.
    """
    asked: list[dict[str, float]] = []
    taking = Taking("the idle server", by="p50_ms", plan=size.loop)
    with connect(port) as connection:

        def idle() -> Times:
            return _noted(asked, taking.number, 0.0, _ask_until(connection, _after(size.idle_s)))

        _burst(process, clients, connection)  # it meets cold code and an empty heap
        while taking.wants_more:
            before = idle()
            busy = _noted(asked, taking.number, 1.0, _burst(process, clients, connection))
            taking.add(before, busy, idle())
    return taking.done(), asked


def _noted(asked: list[dict[str, float]], pair: int, busy: float, taken_ms: Iterator[float] | list[float]) -> Times:
    taken = list(taken_ms)
    asked += [{"pair": float(pair), "busy": busy, "ms": ms} for ms in taken]
    return {"p50_ms": statistics.median(taken), "p99_ms": _p99(taken)}


def _burst(process: subprocess.Popen[bytes], clients: subprocess.Popen[str], connection: socket.socket) -> list[float]:
    """Have twenty clients ask for images, and return the milliseconds of each `/healthz` asked while the images are handed out and read.

    Raises:
        RuntimeError: the clients do not report in time that they wait or are done.
    """
    process.send_signal(signal.SIGUSR1)  # hold the images back
    print("burst", file=clients.stdin, flush=True)
    _expect(clients, "waiting")
    process.send_signal(signal.SIGUSR1)  # hand them out
    ends = time.monotonic() + DEADLINE_S
    busy = list(_ask_until(connection, lambda: _has_line(clients) or time.monotonic() > ends))
    _expect(clients, "done")
    return busy


def _after(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def _ask_until(connection: socket.socket, over: Callable[[], bool]) -> Iterator[float]:
    """Ask `/healthz` again and again, once at least, until `over` returns true; yield the milliseconds of each answer."""
    while True:
        started = time.perf_counter()
        ask(connection, HEALTH)
        yield (time.perf_counter() - started) * 1000
        if over():
            return
        time.sleep(PAUSE_S)


def _has_line(clients: subprocess.Popen[str]) -> bool:
    assert clients.stdout is not None
    return bool(select.select([clients.stdout], [], [], 0)[0])


def _expect(clients: subprocess.Popen[str], word: str) -> None:
    if (found := next_line(clients, within_s=DEADLINE_S)) != word:
        raise RuntimeError(f"expected the clients to say {word!r}, found {found!r}")


# The process


def _starts(size: Size) -> tuple[list[dict[str, float]], float]:
    """Start the real worker several times; return the seconds and CPU seconds of each start until its first answer to `/healthz`.

    Beside them stands the last server's resident memory in MB, after it is ready and has made some images.
    """
    options = ("serve", f"--model={DIGITS}", "--host=127.0.0.1", "--port=0", "--control-port=0")
    command = [sys.executable, "-m", "diffusion_worker.cli", *options]
    starts, resident_mb = [], 0.0
    for number in range(size.starts):
        started = time.perf_counter()
        with server(command) as (process, port):
            with connect(port) as connection:
                ask(connection, HEALTH)
            starts.append({"first_answer_s": time.perf_counter() - started, "first_answer_cpu_s": cpu_seconds(process.pid)})
            if number == size.starts - 1:
                wait_ready(process, port)
                for _ in range(size.images):
                    make_image(port)
                resident_mb = status_mb(process.pid, "VmRSS")
    return starts, resident_mb


def _p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]
