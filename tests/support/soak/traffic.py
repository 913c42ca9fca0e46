# SPDX-License-Identifier: Apache-2.0
"""The traffic of the soak: generated requests to a real worker of two ranks, and again while its ranks are killed.

Good requests come from a small pool, so each image can be compared with the one made alone. Among them are wrong requests, requests for
missing models, and requests whose client leaves. The same seed makes the same requests.
"""

import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.soak.frame import Asked, Asking, Outcome, difference, metric_values, pixels, signal_rank, total
from support.worker.leftovers import footprint, left_at_end, left_over
from support.worker.process import DIGITS, WorkerProcess

MODELS = ("digits", "digits", "stripes", "frame")
SIZES = ("32x32", "48x32", "64x64")
GUIDANCE = (1.0, 4.0, 7.5)
COLOURS = ("red", "green", "blue")
NUMERALS = ("one", "two", "seven", "nine")
LORAS = {name: DIGITS / "loras" / name for name in ("stripes", "frame")}
RANKS = 2
IMAGES = 60
MOST_STEPS = 12
TOLERANCE = 1  # a level of 255, since a batch of another size rounds its sums in another order

# Wrong requests, with the status of the answer.
BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": ""}, 400),
    ({"prompt": "p kumquatfen", "size": "33x32"}, 400),
    ({"prompt": "p kumquatfen", "size": "9999x9999"}, 400),
    ({"prompt": "p kumquatfen", "n": 100}, 400),
    ({"prompt": "p kumquatfen", "num_inference_steps": 100_000}, 400),
    ({"prompt": "p kumquatfen", "guidance_scale": -1.0}, 400),
    ({"prompt": "p kumquatfen", "unknown": True}, 400),
    ({"prompt": "p kumquatfen", "model": "nobody"}, 404),
    ({"prompt": ["a", "list"]}, 400),
)


def pool(seed: int, size: int, *, most_steps: int = MOST_STEPS) -> list[dict[str, Any]]:
    """Return `size` valid request bodies, which vary in prompt, model, size, guidance and steps. The seed decides them; request i has
    the seed i."""
    rng = random.Random(seed)
    return [
        {
            "prompt": f"a {rng.choice(COLOURS)} digit {rng.choice(NUMERALS)} kumquatfen",
            "model": rng.choice(MODELS),
            "size": rng.choice(SIZES),
            "guidance_scale": rng.choice(GUIDANCE),
            "num_inference_steps": rng.randint(1, most_steps),
            "seed": number,
        }
        for number in range(size)
    ]


def traffic(seed: int, count: int, bodies: list[dict[str, Any]], *, bad: float, aborted: float) -> list[Asked]:
    """Return `count` random requests. Each is wrong with the chance `bad`, and given up by its client with the chance `aborted`."""
    rng, found = random.Random(seed), []
    for kind in (rng.random() for _ in range(count)):
        if kind < bad:
            body, status = rng.choice(BAD)
            found.append(Asked(None, [], sent=body, expected=status))
        else:
            image = rng.randrange(len(bodies))
            found.append(Asked(image, [], sent=bodies[image], gone_after_s=rng.uniform(0.0, 0.3) if kind < bad + aborted else None))
    return found


# The error of such an image, and the refusal of the same image afterwards.
LOST_TWICE = ("the rank group was lost twice while this image was made", "the rank group was lost twice while such an image was made")


class TrafficSoak:
    """Traffic on one worker, and reference images of the pool that were made alone.

    Real: the worker, its two ranks and what kills them. Not real: nothing.
    """

    def __init__(self, worker: WorkerProcess, *, seed: int, images: int) -> None:
        self._worker, self._asking = worker, Asking(lambda: worker.url)
        self._bodies = pool(seed, images)
        self._alone = [pixels(worker.request_images(**body).json()) for body in self._bodies]

    def run(self, seed: int, count: int, *, bad: float, aborted: float, limit_s: float, kill_every_s: float | None = None) -> Outcome:
        """Send the requests until all are answered or the time is over. Every failure is a fault.

        A request that ran alone when a second rank was killed is excepted. The worker takes it for the cause, and refuses its content for
        ten minutes.
        """
        counts = "answered given_up refused_as_they_should replayed restarts worst_difference"
        outcome = Outcome(seed, counts=counts, tallies="failed losses")
        before, requests = self._lost(), traffic(seed, count, self._bodies, bad=bad, aborted=aborted)
        killing = partial(self._kill_ranks, outcome, kill_every_s, limit_s)
        for asked in self._asking.ask_all(requests, outcome, limit_s=limit_s, beside=killing):
            self._judge(outcome, asked, excused=LOST_TWICE if kill_every_s else ())
        outcome.restarts, outcome.replayed = (now - was for now, was in zip(self._lost(), before, strict=True))
        return outcome

    def _judge(self, outcome: Outcome, asked: Asked, excused: tuple[str, ...]) -> None:
        if asked.code == "no answer" and asked.gone_after_s is not None:
            outcome.given_up += 1
        elif not asked.status:
            outcome.wrong.append(f"{asked.code}, {asked.document}: {asked.sent}")
        elif asked.status == 200 == asked.expected:
            off = difference(pixels(asked.document), self._alone[asked.body])
            outcome.answered += 1
            outcome.worst_difference = max(outcome.worst_difference, off)
            if off > TOLERANCE:
                outcome.wrong.append(f"an image differs by {off} levels from the one made alone: {asked.sent}")
        elif asked.status == asked.expected:
            outcome.refused_as_they_should += 1
        else:
            outcome.failed[asked.code] += 1
            if not any(words in str(asked.document) for words in excused):
                outcome.wrong.append(f"expected {asked.expected}, found {asked.status} {asked.document}")

    def _kill_ranks(self, outcome: Outcome, every_s: float | None, limit_s: float, over: threading.Event) -> None:
        """Send SIGKILL, or SIGSTOP in a quarter of the cases, to some rank at a random moment of each `every_s` seconds. With None it
        sends nothing.

        In three of four cases these seconds begin when the group serves again, so that a slow machine makes images as well. After
        `limit_s` it stops, so that what was begun is answered."""
        rng, ends = random.Random(outcome.seed), time.monotonic() + limit_s
        while every_s and not over.wait(at := rng.uniform(0.0, every_s)) and time.monotonic() < ends:
            number = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
            outcome.losses[number.name] += signal_rank(self._worker, rng.randrange(RANKS), number)
            over.wait(every_s - at)
            waits = rng.random() < 0.75
            while waits and self._worker.state()["state"] != "ready" and not over.wait(0.1):
                pass

    def _lost(self) -> tuple[int, int]:
        values = metric_values(self._worker.get("/metrics").text)
        return total(values, "diffusion_worker_rank_group_restarts_total"), total(values, "diffusion_worker_images_replayed_total")


def run_both(
    folder: Path, requests: int, kill_requests: int, kill_every_s: float, *, seed: int, limit_s: float, images: int = IMAGES
) -> list[Outcome]:
    """Run the soak, then again with ranks being killed; `folder` is for the worker's temporary files."""
    with WorkerProcess(ranks=RANKS, loras=LORAS, options=("--max-restarts=100000",), env={"TMPDIR": str(folder)}) as worker:
        worker.wait_ready()
        soak = TrafficSoak(worker, seed=seed, images=images)
        warm = soak.run(seed, max(1, requests // 10), bad=0.1, aborted=0.1, limit_s=limit_s / 20)
        before = footprint(worker)
        peaceful = soak.run(seed + 1, requests - requests // 10, bad=0.1, aborted=0.1, limit_s=limit_s / 2)
        peaceful.done += warm.done
        peaceful.wrong += warm.wrong + left_over(worker, before)
        killed = soak.run(seed + 2, kill_requests, bad=0.05, aborted=0.0, limit_s=limit_s / 2, kill_every_s=kill_every_s)
        killed.wrong += left_over(worker, before) + left_at_end(worker, folder)
    return [peaceful, killed]
