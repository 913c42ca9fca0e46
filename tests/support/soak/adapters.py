# SPDX-License-Identifier: Apache-2.0
"""The soak of adapters: requests over many of them with few slots, while they are added, replaced and removed.

Every image is judged twice: by the digests in its provenance, which must be what its names stood for while it was made, and
by the image that those adapters made alone.
"""

import asyncio
import base64
import hashlib
import io
import json
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from support.worker.leftovers import Footprint, footprint, left_at_end, left_over
from support.worker.process import DIGITS_MODEL, WorkerProcess

CLIENTS = 12
ANSWER_TIMEOUT_S = 180.0
# Levels of 255: a batch of another size rounds its sums in another order.
TOLERANCE = 2
# What the images of two adapters differ by at the least, or a mix-up might not be seen.
APART = 25
SLOTS, CACHED = 8, 16
NAMES, STATIC = 40, 6
# More contents than names: a name that is replaced may get one that nobody has, or that another name has as well.
SPARE_CONTENTS = 8
HOT = 12
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a red digit seven", "seed": 1, "size": "32x32", "num_inference_steps": 4},
    {"prompt": "a blue digit two", "seed": 2, "size": "32x32", "num_inference_steps": 3},
)
# Adapters of names that always stand for the same content, together in a request.
PAIRS = ((0, 1), (1, 2), (3, 4), (5, 0), (2, 5))

Key = tuple[int, tuple[int, ...]]


@dataclass
class AdapterOutcome:
    """What one run came to. `nearest` is the least difference of two references, memory is in MiB by process."""

    seed: int
    asked: int = 0
    images: Counter[str] = field(default_factory=Counter)
    not_found: int = 0
    churn: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    loads: int = 0
    worst_difference: int = 0
    nearest: int = 255
    before_mib: list[int] = field(default_factory=list)
    after_mib: list[int] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1)})


@dataclass
class Spell:
    """A time in which a name may have stood for a content; None: for nothing."""

    content: int | None
    begins: float
    ends: float = float("inf")


def write_contents(folder: Path, count: int, seed: int) -> list[Path]:
    """Adapters of the digits model, each with an effect of its own."""
    # Here, as the tests of how answers are judged need none of it, and it takes seconds.
    import torch
    from diffusers import SD3Transformer2DModel

    from support.lora.peft_adapters import write_adapter

    model = SD3Transformer2DModel.from_pretrained(DIGITS_MODEL, subfolder="transformer")
    wanted = ("to_q", "to_v", "to_out.0", "ff.net.2")
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("transformer_blocks") and name.endswith(wanted)
    }
    folders = [folder / f"content-{number}" for number in range(count)]
    for number, content in enumerate(folders):
        content.mkdir()
        write_adapter(content, linears, rank=2 + number % 3 * 2, seed=seed * 1000 + number)
    return folders


class AdapterSoak:
    """Traffic and changes on one worker. Names are `style-0` and on; the first `STATIC` of them never change."""

    def __init__(self, worker: WorkerProcess | None, contents: list[Path], *, seed: int, names: int = NAMES) -> None:
        self._worker = worker
        self.outcome = AdapterOutcome(seed)
        self._rng = random.Random(seed)
        self._contents = contents
        self.digests = {_digest(path / "adapter_model.safetensors"): number for number, path in enumerate(contents)}
        self._names = [f"style-{number}" for number in range(names)]
        self.spells: dict[str, list[Spell]] = {}
        self.alone: dict[Key, Any] = {}

    @property
    def worker(self) -> WorkerProcess:
        """What is soaked; only answers are judged without one."""
        assert self._worker is not None
        return self._worker

    def prepare(self) -> None:
        """Make every image that a request may ask for alone, then put all names."""
        for content, path in enumerate(self._contents):
            self._require(self.worker.put_adapter("reference", path))
            for body in range(len(BODIES)):
                self._make_alone(body, (content,), ["reference"])
        self._require(self.worker.delete_adapter("reference"))
        for number, name in enumerate(self._names):
            self._require(self.worker.put_adapter(name, self._contents[number]))
            self.spells[name] = [Spell(number, 0.0)]
        for body in range(len(BODIES)):
            self._make_alone(body, (), [])
            for pair in PAIRS:
                self._make_alone(body, tuple(sorted(pair)), [self._names[number] for number in pair])
        self.outcome.nearest = self._nearest()

    async def run(self, count: int, *, limit_s: float) -> None:
        """Send the requests from a dozen clients, and change adapters, until all are answered or the time is over."""
        started = time.monotonic()
        left = iter(range(count))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as session:

            async def client() -> None:
                for _ in left:
                    if time.monotonic() - started > limit_s:
                        return
                    await self._ask(session)

            changing = asyncio.create_task(self._change(session))
            await asyncio.gather(*(client() for _ in range(min(CLIENTS, count))))
            changing.cancel()
            for result in await asyncio.gather(changing, return_exceptions=True):
                if isinstance(result, Exception):
                    self.outcome.wrong.append(f"the changes ended: {result!r}")
        self.outcome.seconds += time.monotonic() - started

    # --- requests -------------------------------------------------------------------------------------------------------

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body, (kind, names) = self._rng.randrange(len(BODIES)), self._choice()
        asked: dict[str, Any] = {**BODIES[body]}
        if kind == "model":
            asked["model"] = names[0]
        elif names:
            asked["lora"] = [{"name": name} for name in names]
        self.outcome.asked += 1
        begun = time.monotonic()
        try:
            async with session.post(f"{self.worker.url}/v1/images/generations", json=asked) as response:
                status, document = response.status, await response.json()
        except (TimeoutError, aiohttp.ClientError) as error:
            self.outcome.wrong.append(f"{type(error).__name__} {error} for {names}")
            return
        self.judge(body, kind, names, begun, status, document)

    def _choice(self) -> tuple[str, list[str]]:
        kind = self._rng.choices(["model", "lora", "pair", "base"], [40, 40, 15, 5])[0]
        if kind == "base":
            return kind, []
        if kind == "pair":
            # In any order, which decides nothing.
            return kind, [self._names[number] for number in self._rng.sample(self._rng.choice(PAIRS), 2)]
        return kind, [self._rng.choice(self._names[:HOT] if self._rng.random() < 0.5 else self._names)]

    def judge(self, body: int, kind: str, names: list[str], begun: float, status: int, document: dict[str, Any]) -> None:
        """Whether an answer to a request that began then is right."""
        outcome = self.outcome
        could_be = [self._could_be(name, begun) for name in names]
        if status == 404 and any(None in contents for contents in could_be):
            outcome.not_found += 1
            return
        if status != 200:
            outcome.wrong.append(f"{names}: {status} {document}")
            return
        used = document["data"][0]["provenance"]["adapters"]
        contents = [self.digests.get(adapter["digest"], -1) for adapter in used]
        if [adapter["name"] for adapter in used] != names or any(
            content not in could for content, could in zip(contents, could_be, strict=True)
        ):
            outcome.wrong.append(f"{names} were {could_be}: made with {contents}")
            return
        difference = _difference(_pixels(document), self.alone[body, tuple(sorted(contents))])
        outcome.images[kind] += 1
        outcome.worst_difference = max(outcome.worst_difference, difference)
        if difference > TOLERANCE:
            near = [key for key, alone in self.alone.items() if _difference(_pixels(document), alone) <= TOLERANCE]
            outcome.wrong.append(f"{names} ({contents}) body {body}: differs by {difference} levels; it is the image of {near}")

    def _could_be(self, name: str, begun: float) -> set[int | None]:
        return {spell.content for spell in self.spells[name] if spell.ends >= begun}

    # --- changes --------------------------------------------------------------------------------------------------------

    async def _change(self, session: aiohttp.ClientSession) -> None:
        """Add, replace and remove adapters for ever."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.02, 0.25))
            name = self._rng.choice(self._names[STATIC:])
            if self.spells[name][-1].content is None:
                await self._changed(session, name, "added", self._rng.randrange(len(self._contents)))
            elif self._rng.random() < 0.3:
                await self._changed(session, name, "removed", None)
            else:
                await self._changed(session, name, "replaced", self._rng.randrange(len(self._contents)))

    async def _changed(self, session: aiohttp.ClientSession, name: str, what: str, content: int | None) -> None:
        spells = self.spells[name]
        spells.append(Spell(content, time.monotonic()))
        url = f"{self.worker.control_url}/v1/adapters/{name}"
        call = {"operationId": uuid.uuid4().hex, "bootId": self.worker.boot_id}
        headers = {"Authorization": f"Bearer {self.worker.token}"}
        if content is None:
            changing = session.delete(url, params={**call, "drainSeconds": "60"}, headers=headers)
        else:
            body = {**call, "source": {"path": str(self._contents[content])}, "deadlineSeconds": 60}
            changing = session.put(url, json=body, headers=headers)
        async with changing as response:
            if response.status != 200:
                self.outcome.wrong.append(f"{what} {name}: {response.status} {await response.text()}")
        self.outcome.churn[what] += 1
        spells[-2].ends = time.monotonic()
        # What ended before every request that runs is of no use any more.
        self.spells[name] = [spell for spell in spells if spell.ends > time.monotonic() - ANSWER_TIMEOUT_S]

    # --- references -----------------------------------------------------------------------------------------------------

    def _make_alone(self, body: int, contents: tuple[int, ...], names: list[str]) -> None:
        document = self.worker.request_images(**BODIES[body], lora=[{"name": name} for name in names]).json()
        self.alone[body, contents] = _pixels(document)

    def _nearest(self) -> int:
        nearest = 255
        for body in range(len(BODIES)):
            images = np.stack([alone for (of, _), alone in self.alone.items() if of == body])
            for number in range(len(images) - 1):
                differences = np.abs(images[number + 1 :] - images[number]).max(axis=(1, 2, 3))
                nearest = min(nearest, int(differences.min()))
        if nearest < APART:
            self.outcome.wrong.append(f"two references differ by {nearest} levels only")
        return nearest

    def _require(self, answer: Any) -> None:
        assert answer.status_code == 200, answer.text


async def run_adapters(folder: Path, *, seed: int, requests: int, limit_s: float, names: int = NAMES) -> AdapterOutcome:
    """The soak; `folder` is for adapters and the worker's temporary files."""
    contents = write_contents(folder, names + SPARE_CONTENTS, seed)
    options = (f"--max-loras={SLOTS}", f"--max-cached-loras={CACHED}", "--lora-on-missing=load", "--max-batch-size=8")
    with WorkerProcess(options=options, env={"TMPDIR": str(folder)}) as worker:
        worker.wait_ready()
        soak = AdapterSoak(worker, contents, seed=seed, names=names)
        soak.prepare()
        await soak.run(max(1, requests // 10), limit_s=limit_s / 4)
        before = footprint(worker)
        await soak.run(requests - requests // 10, limit_s=limit_s)
        outcome = soak.outcome
        outcome.before_mib, outcome.after_mib = _mib(before), _mib(footprint(worker))
        outcome.evictions, outcome.loads = _counted(worker, "adapter_evictions_total"), _counted(worker, 'adapter_loads_total{code="OK"}')
        outcome.wrong += left_over(worker, before)
        outcome.wrong += left_at_end(worker, folder)
    return outcome


def _mib(found: Footprint) -> list[int]:
    return [resident // 2**20 for resident, _ in found.values()]


def _counted(worker: WorkerProcess, name: str) -> int:
    lines = worker.get("/metrics").text.splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith(f"diffusion_worker_{name}"))


def _digest(weights: Path) -> str:
    return f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"


def _pixels(document: dict[str, Any]) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(document["data"][0]["b64_json"])))).astype(int)


def _difference(one: Any, other: Any) -> int:
    return 255 if one.shape != other.shape else int(np.abs(one - other).max())
