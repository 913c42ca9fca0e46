# SPDX-License-Identifier: Apache-2.0
"""The images' part of `make soak`: hostile files for edits of a real worker, sent by several callers.

Each is refused by its field, or made into an image as Pillow reads it, within its deadline. Image requests go on meanwhile. Their 99th
percentile is compared with the one beside edits of ordinary files.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event

import httpx2
import numpy as np

from support.encoding.hostile_images import HostileImage, draw, image_file
from support.soak.frame import Outcome, those_that_hold
from support.worker.leftovers import footprint, left_over
from support.worker.process import WorkerProcess

CALLERS = 3
# For one edit. The deadline of a decode is 60 s, since the machine may be busy.
MOST_S = 75.0
MOST_IMAGE_S = 10.0
MOST_ORDINARY = 300
# The ratio of the two percentiles is meaningful from so many requests on.
MANY = 1_000
MOST_RATIO = 1.5


def run_images(_: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Start a worker for `send_images`. The first argument is not used."""
    with WorkerProcess() as worker:
        worker.wait_ready()
        return send_images(worker, count, seed=seed, limit_s=limit_s)


def send_images(worker: WorkerProcess, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Send `count` hostile files to a real worker, or as many as `limit_s` seconds allow, and return the outcome.

    Ordinary files come before, for at most a quarter of that time more.
    """
    others = {"p99_ordinary_s": 0.0, "p99_hostile_s": 0.0, "p99_ratio": 0.0, "slowest_s": 0.0, "slowest": ""}
    outcome, rng = Outcome(seed, counts="made images", tallies="refused kinds", **others), Random(seed)
    ordinary = HostileImage("ordinary", image_file("PNG", rng), True)
    _edit(worker, ordinary)
    before = footprint(worker)
    with ThreadPoolExecutor(CALLERS) as callers:

        def in_turns(draws: Callable[[], HostileImage], many: int, until_s: float) -> Iterator[tuple[HostileImage, httpx2.Response, float]]:
            ends = time.monotonic() + until_s
            for number in range(0, many, CALLERS):
                if time.monotonic() > ends:
                    return
                yield from callers.map(lambda file: _edit(worker, file), [draws() for _ in range(min(CALLERS, many - number))])

        with _beside(worker, outcome) as seconds:
            for _ in in_turns(lambda: ordinary, min(count, MOST_ORDINARY), limit_s / 4):
                pass
        outcome.p99_ordinary_s = float(np.percentile(seconds, 99))
        began = time.monotonic()
        with _beside(worker, outcome) as seconds:
            for found in in_turns(lambda: draw(rng), count, limit_s):
                _judge(outcome, *found)
        outcome.seconds, outcome.images = time.monotonic() - began, len(seconds)
        outcome.p99_hostile_s = float(np.percentile(seconds, 99))
    outcome.p99_ratio = outcome.p99_hostile_s / outcome.p99_ordinary_s
    if outcome.done >= MANY and outcome.p99_ratio > MOST_RATIO:
        outcome.wrong.append(f"images beside them took {outcome.p99_ratio:.2f} times as long as beside ordinary files")
    outcome.wrong += left_over(worker, before)
    return outcome


def _edit(worker: WorkerProcess, file: HostileImage) -> tuple[HostileImage, httpx2.Response, float]:
    began = time.monotonic()
    with httpx2.Client(base_url=worker.url, timeout=MOST_S * 2) as client:
        body = {"prompt": "digit seven", "num_inference_steps": "2", "size": "16x16"}
        answer = client.post("/v1/images/edits", data=body, files={"image": ("upload", file.content, "image/png")})
    return file, answer, time.monotonic() - began


def _judge(outcome: Outcome, file: HostileImage, answer: httpx2.Response, seconds: float) -> None:
    outcome.done += 1
    outcome.kinds[file.kind] += 1
    made, error = answer.status_code == 200, answer.json().get("error", {})
    outcome.made += made
    outcome.refused.update([] if made else [str(error.get("code"))])
    if seconds > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = seconds, file.kind
    wrong = {
        f"took {seconds:.1f} s": seconds > MOST_S,
        "was made into an image": made and file.loads is False,
        f"was refused: {error.get('message')}": not made and file.loads is True,
        f"got {answer.status_code}": not made and answer.status_code != 400,
        f"the refusal does not name its field: {error.get('message')}": answer.status_code == 400 and error.get("param") != "image",
    }
    outcome.wrong += [f"seed {outcome.seed}, file {outcome.done}, {file.kind}: {what}"[:600] for what in those_that_hold(wrong)]


@contextmanager
def _beside(worker: WorkerProcess, outcome: Outcome) -> Iterator[list[float]]:
    """Ask for images while the block lasts, and yield the list of their seconds, which grows; faults go to `outcome.wrong`."""
    over, seconds = Event(), list[float]()

    def ask() -> None:
        with httpx2.Client(base_url=worker.url, timeout=60) as client:
            while not over.wait(0.02):
                began = time.monotonic()
                answer = client.post("/v1/images/generations", json={"prompt": "digit seven", "num_inference_steps": 2, "size": "16x16"})
                seconds.append(time.monotonic() - began)
                if answer.status_code != 200 or seconds[-1] > MOST_IMAGE_S:
                    outcome.wrong.append(f"an image: {answer.status_code} after {seconds[-1]:.1f} s")

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield seconds
        finally:
            over.set()
        outcome.wrong += [f"what went on beside it ended: {error!r}"] if (error := asking.exception()) else []
