# SPDX-License-Identifier: Apache-2.0
"""`make soak`: thousands of generated requests against a real worker of two ranks, and again while its ranks are killed.

    python -m support.soak.run [--requests 10000] [--kill-requests 1000] [--kill-every 20] [--edge-requests 10000]
                                 [--adapter-requests 5000] [--adapter-files 10000] [--sleep-sequences 500]
                                 [--manifests 5000] [--operator-sequences 500]
                                 [--minutes 60] [--seed 1]
                                 [--part traffic] [--part edge] [--part adapters] [--part adapter-files] [--part sleep]
                                 [--part manifests] [--part operator] [--part node]

Ends with 1 and what went wrong: an answer with another code than it should have, an image other than the one made alone, a
request without an answer, or rows, memory, descriptors, processes or folders that are left. Where the minutes are over
before the requests are, it says how many there were.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from support.soak.adapter_files import run_files
from support.soak.adapters import run_adapters
from support.soak.edge import run_edge
from support.soak.node import run_node
from support.soak.operator_manifests import run_manifests
from support.soak.operator_process import own_apiserver
from support.soak.operator_sequences import run_sequences
from support.soak.sleep import run_sleep
from support.soak.traffic import Request, pool, traffic
from support.worker.leftovers import footprint, left_at_end, left_over
from support.worker.process import DIGITS, WorkerProcess

CLIENTS = 12
ANSWER_TIMEOUT_S = 180.0
IMAGES = 60
MOST_STEPS = 12
# One level of 255: a batch of another size rounds its sums in another order.
TOLERANCE = 1


@dataclass
class Outcome:
    """What one run came to."""

    seed: int
    asked: int = 0
    answered: int = 0
    given_up: int = 0
    refused_as_they_should: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    restarts: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    worst_difference: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1)})


class Soak:
    """Traffic on one worker. Failures with a code count as wrong unless ranks are being killed."""

    def __init__(self, worker: WorkerProcess, *, seed: int, images: int) -> None:
        self.worker = worker
        self.outcome = Outcome(seed)
        self._bodies = pool(seed, images, most_steps=MOST_STEPS)
        self._alone: list[Any] = []
        self._killing = False

    def make_alone(self) -> None:
        """Every image of the pool without company: what all others are compared with."""
        self._alone = [_pixels(self.worker.request_images(**body).json()) for body in self._bodies]

    async def run(self, count: int, *, bad: float, aborted: float, limit_s: float, kill_every_s: float | None = None) -> None:
        """Send the requests from a dozen clients until all are answered or the time is over."""
        started = time.monotonic()
        restarts, replayed = self._told()
        waiting = iter(traffic(self.outcome.seed, count, self._bodies, bad=bad, aborted=aborted))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as session:

            async def client() -> None:
                for request in waiting:
                    if time.monotonic() - started > limit_s:
                        return
                    await self._ask(session, request)

            killer = asyncio.create_task(self._kill_ranks(kill_every_s)) if kill_every_s else None
            self._killing = killer is not None
            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            if killer is not None:
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
        after_restarts, after_replayed = self._told()
        self.outcome.restarts, self.outcome.replayed = after_restarts - restarts, after_replayed - replayed
        self.outcome.seconds = time.monotonic() - started

    async def _ask(self, session: aiohttp.ClientSession, request: Request) -> None:
        self.outcome.asked += 1
        url = f"{self.worker.url}/v1/images/generations"
        try:
            async with asyncio.timeout(request.gone_after_s), session.post(url, json=request.body) as response:
                status, document = response.status, await response.json()
        except TimeoutError:
            if request.gone_after_s is None:
                self.outcome.wrong.append(f"no answer within {ANSWER_TIMEOUT_S:g} s: {request.body}")
            else:
                self.outcome.given_up += 1
            return
        except aiohttp.ClientError as error:
            self.outcome.wrong.append(f"{type(error).__name__}: {error}")
            return
        self._judge(request, status, document)

    def _judge(self, request: Request, status: int, document: dict[str, Any]) -> None:
        outcome = self.outcome
        if status == 200 and request.status == 200 and request.image is not None:
            difference = _difference(_pixels(document), self._alone[request.image])
            outcome.answered += 1
            outcome.worst_difference = max(outcome.worst_difference, difference)
            if difference > TOLERANCE:
                outcome.wrong.append(f"an image differs by {difference} levels from the one made alone: {request.body}")
        elif status == request.status:
            outcome.refused_as_they_should += 1
        else:
            code = document.get("error", {}).get("code")
            outcome.failed[str(code)] += 1
            if not self._killing or code != "RankFailed":
                outcome.wrong.append(f"expected {request.status}, found {status} {document}")

    async def _kill_ranks(self, every_s: float) -> None:
        """A random rank at a random moment of every interval; one in four is stopped, not killed."""
        rng = random.Random(self.outcome.seed)
        while True:
            at = rng.uniform(0.0, every_s)
            await asyncio.sleep(at)
            pids = [rank["pid"] for rank in self.worker.state()["ranks"] if rank["pid"]]
            if pids:
                number = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
                try:
                    os.kill(rng.choice(pids), number)
                    self.outcome.losses[number.name] += 1
                except ProcessLookupError:
                    pass  # its group is being ended already
            await asyncio.sleep(every_s - at)

    def _told(self) -> tuple[int, int]:
        metrics = self.worker.get("/metrics").text.splitlines()
        values = {line.split()[0]: float(line.split()[-1]) for line in metrics if not line.startswith("#")}
        return tuple(int(values[f"diffusion_worker_{name}_total"]) for name in ("rank_group_restarts", "images_replayed"))  # type: ignore[return-value]


def _pixels(document: dict[str, Any]) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(document["data"][0]["b64_json"])))).astype(int)


def _difference(one: Any, other: Any) -> int:
    return 255 if one.shape != other.shape else int(np.abs(one - other).max())


async def run_both(
    folder: Path, *, seed: int, requests: int, kill_requests: int, kill_every_s: float, limit_s: float, images: int = IMAGES
) -> list[Outcome]:
    """The soak, then the same worker with its ranks being killed; `folder` is for the worker's temporary files."""
    loras = {name: DIGITS / "loras" / name for name in ("stripes", "frame")}
    with WorkerProcess(ranks=2, loras=loras, options=("--max-restarts=100000",), env={"TMPDIR": str(folder)}) as worker:
        worker.wait_ready()
        soak = Soak(worker, seed=seed, images=images)
        soak.make_alone()
        await soak.run(max(1, requests // 10), bad=0.1, aborted=0.1, limit_s=limit_s / 20)
        warm, before = soak.outcome, footprint(worker)
        soak.outcome = peaceful = Outcome(seed + 1, asked=warm.asked, wrong=warm.wrong)
        await soak.run(requests - requests // 10, bad=0.1, aborted=0.1, limit_s=limit_s / 2)
        peaceful.wrong += left_over(worker, before)
        soak.outcome = killed = Outcome(seed + 2)
        await soak.run(kill_requests, bad=0.05, aborted=0.0, limit_s=limit_s / 2, kill_every_s=kill_every_s)
        killed.wrong += left_over(worker, before)
        killed.wrong += left_at_end(worker, folder)
    return [peaceful, killed]


def main() -> int:
    """Run, print, judge."""
    options = argparse.ArgumentParser(description="Soak a real worker of two ranks.")
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--kill-requests", type=int, default=1_000)
    options.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    options.add_argument("--edge-requests", type=int, default=10_000)
    options.add_argument("--adapter-requests", type=int, default=5_000)
    options.add_argument("--adapter-files", type=int, default=10_000)
    options.add_argument("--sleep-sequences", type=int, default=500)
    options.add_argument("--manifests", type=int, default=5_000)
    options.add_argument("--operator-sequences", type=int, default=500)
    options.add_argument("--minutes", type=float, default=60.0, help="For each part.")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--part", action="append", choices=RUNS, help="Only this one; may be given again.")
    asked = options.parse_args()
    parts = asked.part or [part for part in RUNS if part not in ON_DEMAND]
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"soak-{os.getpid()}"
    folder.mkdir()
    try:
        # All of them, also after one that found something.
        return int(sum(RUNS[part](asked, folder) for part in parts) > 0)
    finally:
        shutil.rmtree(folder)


def _soak_traffic(asked: argparse.Namespace, folder: Path) -> bool:
    """Whether something was wrong."""
    soaking = run_both(
        folder,
        seed=asked.seed,
        requests=asked.requests,
        kill_requests=asked.kill_requests,
        kill_every_s=asked.kill_every,
        limit_s=asked.minutes * 60,
    )
    outcomes = asyncio.run(soaking)
    for name, outcome, wanted in zip(("soak", "killed ranks"), outcomes, (asked.requests, asked.kill_requests), strict=True):
        print(f"{name}{_cut(outcome.asked, wanted)}: {outcome.line()}", flush=True)
    return any(outcome.wrong for outcome in outcomes)


def _soak_edge(asked: argparse.Namespace, folder: Path) -> bool:
    outcome = asyncio.run(run_edge(folder, seed=asked.seed, requests=asked.edge_requests, limit_s=asked.minutes * 60))
    print(f"edge{_cut(outcome.requests, asked.edge_requests)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


def _soak_adapters(asked: argparse.Namespace, folder: Path) -> bool:
    outcome = asyncio.run(run_adapters(folder, seed=asked.seed, requests=asked.adapter_requests, limit_s=asked.minutes * 60))
    print(f"adapters{_cut(outcome.asked, asked.adapter_requests)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


def _soak_adapter_files(asked: argparse.Namespace, folder: Path) -> bool:
    outcome = run_files(folder, seed=asked.seed, files=asked.adapter_files, limit_s=asked.minutes * 60)
    print(f"adapter files{_cut(outcome.files, asked.adapter_files)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


def _soak_sleep(asked: argparse.Namespace, folder: Path) -> bool:
    outcome = run_sleep(folder, run_seed=asked.seed, sequences=asked.sleep_sequences, limit_s=asked.minutes * 60)
    print(f"sleep{_cut(outcome.sequences, asked.sleep_sequences)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


def _soak_node(asked: argparse.Namespace, folder: Path) -> bool:
    outcome = run_node(seed=asked.seed, limit_s=asked.minutes * 60)
    print(f"node: {outcome.line()}", flush=True)
    return bool(outcome.wrong or outcome.lost)


def _soak_manifests(asked: argparse.Namespace, folder: Path) -> bool:
    with own_apiserver() as kubeconfig:
        outcome = asyncio.run(run_manifests(folder, kubeconfig, seed=asked.seed, manifests=asked.manifests, limit_s=asked.minutes * 60))
    print(f"manifests{_cut(outcome.manifests, asked.manifests)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


def _soak_operator(asked: argparse.Namespace, folder: Path) -> bool:
    wanted = asked.operator_sequences
    with own_apiserver() as kubeconfig:
        outcome = asyncio.run(run_sequences(folder, kubeconfig, seed=asked.seed, sequences=wanted, limit_s=asked.minutes * 60))
    print(f"operator{_cut(outcome.sequences, wanted)}: {outcome.line()}", flush=True)
    return bool(outcome.wrong)


RUNS: dict[str, Callable[[argparse.Namespace, Path], bool]] = {
    "traffic": _soak_traffic,
    "edge": _soak_edge,
    "adapters": _soak_adapters,
    "adapter-files": _soak_adapter_files,
    "sleep": _soak_sleep,
    "manifests": _soak_manifests,
    "operator": _soak_operator,
    "node": _soak_node,
}
# What needs a cluster of its own.
ON_DEMAND = frozenset({"node"})


def _cut(asked: int, wanted: int) -> str:
    return "" if asked >= wanted else f" (the time was over after {asked} of {wanted})"


if __name__ == "__main__":
    sys.exit(main())
