# SPDX-License-Identifier: Apache-2.0
"""Hostile adapters, put into a real worker by several callers while it makes images, for two parts of `make soak`.

Each is refused with a suitable code and the adapter's name, or loaded correctly, within its deadline. Any other answer is a fault, and so
is an image that waits. Leaked processes, threads, memory and descriptors are faults too.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx2
import psutil

from support.soak.frame import Outcome, those_that_hold
from support.sources.hostile import Hostile
from support.worker.leftovers import footprint, left_over
from support.worker.process import WorkerProcess

CALLERS = 4
# A fetch is a process, which takes seconds to start on a busy machine.
MORE_S = 30.0
MOST_IMAGE_S = 10.0
MOST_THREADS_MORE = 8

Beside = Callable[[Event], None]


def outcome_of_puts(seed: int) -> Outcome:
    """Return a new outcome with the fields that `put_all` fills."""
    return Outcome(seed, counts="loaded images", tallies="refused kinds", slowest_image_s=0.0, slowest_s=0.0)


def put_all(
    worker: WorkerProcess, outcome: Outcome, count: int, limit_s: float, *, draw: Callable[[], Hostile], beside: Beside | None = None
) -> None:
    """Put `count` drawn adapters, or as many as there is time for, while images are made and `beside` runs until its event. Wrong
    answers, leaks and errors of `beside` are faults in the outcome."""
    worker.request_images(prompt="digit seven", num_inference_steps=1)
    before, threads = footprint(worker), psutil.Process(worker.pid).num_threads()
    with _beside(worker, outcome, beside), ThreadPoolExecutor(CALLERS) as callers:
        for number in outcome.until(count, limit_s):
            drawn = [draw() for _ in range(min(CALLERS, count - number))]
            for found in callers.map(lambda numbered: _put(worker, *numbered), enumerate(drawn)):
                _judge(outcome, *found)
    outcome.wrong += left_over(worker, before)
    more = psutil.Process(worker.pid).num_threads() - threads
    outcome.wrong += [f"{more} threads more than before"] if more > MOST_THREADS_MORE else []


def _put(worker: WorkerProcess, caller: int, hostile: Hostile) -> tuple[Hostile, httpx2.Response, float]:
    """Put an adapter under its caller's name, and then delete that name, loaded or not. Return the put's answer and its seconds."""
    name, began = f"style-{caller}", time.monotonic()
    body = {"source": hostile.source, "operationId": f"{caller}-{began}", "bootId": worker.boot_id, "deadlineSeconds": hostile.deadline_s}
    headers = {"Authorization": f"Bearer {worker.token}"}
    with httpx2.Client(base_url=worker.control_url, headers=headers, timeout=hostile.deadline_s + 2 * MORE_S) as client:
        answer = client.put(f"/v1/adapters/{name}", json=body)
        seconds = time.monotonic() - began
        query: dict[str, Any] = {"operationId": f"{caller}-{began}-away", "bootId": worker.boot_id, "drainSeconds": 10}
        client.delete(f"/v1/adapters/{name}", params=query)
    return hostile, answer, seconds


def _judge(outcome: Outcome, hostile: Hostile, answer: httpx2.Response, seconds: float) -> None:
    outcome.done += 1
    outcome.kinds[hostile.kind] += 1
    outcome.slowest_s = max(outcome.slowest_s, seconds)
    loaded, document = answer.status_code == 200, answer.json()
    code = None if loaded else document["code"]
    outcome.loaded += loaded
    outcome.refused.update([] if loaded else [code])
    wrong = {
        f"took {seconds:.1f} s": seconds > hostile.deadline_s + MORE_S,
        "was loaded": loaded and hostile.loads is False,
        f"was refused with {code}: {document.get('message')}": not loaded and (hostile.loads is True or code not in hostile.codes),
        "the refusal does not name its adapter or field": not loaded and not any(
            word in document["message"] for word in ("style-", "source.", "claim ")
        ),
    }  # fmt: skip
    outcome.wrong += [f"seed {outcome.seed}, {hostile.kind} {str(hostile.source)[:300]}: {what}"[:900] for what in those_that_hold(wrong)]


@contextmanager
def _beside(worker: WorkerProcess, outcome: Outcome, more: Beside | None) -> Iterator[None]:
    """Make images, and run `more`, until the end of the block. An exception in either is a fault in the outcome."""
    over = Event()
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(_make_images, worker, outcome, over)] + ([threads.submit(more, over)] if more else [])
        try:
            yield
        finally:
            over.set()
        outcome.wrong += [f"what went on beside it ended: {one.exception()!r}" for one in running if one.exception()]


def _make_images(worker: WorkerProcess, outcome: Outcome, over: Event) -> None:
    with httpx2.Client(base_url=worker.url, timeout=60) as client:
        while not over.wait(0.1):
            began = time.monotonic()
            answer = client.post("/v1/images/generations", json={"prompt": "digit seven", "num_inference_steps": 1})
            seconds = time.monotonic() - began
            outcome.images += 1
            outcome.slowest_image_s = max(outcome.slowest_image_s, seconds)
            if answer.status_code != 200 or seconds > MOST_IMAGE_S:
                outcome.wrong.append(f"an image: {answer.status_code} after {seconds:.1f} s")
