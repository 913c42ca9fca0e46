# SPDX-License-Identifier: Apache-2.0
"""The soak of adapters: requests over many of them with few slots, while they are added, replaced and removed.

Every image is judged twice. The digests in its provenance must be those that its names stood for at the time. The pixels must equal the
image that those adapters made alone.
"""

import hashlib
import random
import threading
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from support.soak.frame import Asked, Asking, Outcome, difference, metric_values, pixels, total
from support.worker.leftovers import footprint, left_at_end, left_over
from support.worker.process import DIGITS_MODEL, WorkerProcess

# Levels of 255, since a batch of another size rounds its sums in another order.
TOLERANCE = 2
# The least difference between the images of two adapters; with less a mix-up might go unnoticed.
APART = 25
SLOTS, CACHED = 8, 16
NAMES, STATIC = 40, 6
# More contents than names: a replaced name may get an unused content, or that of another name.
SPARE_CONTENTS = 8
HOT = 12
QUICK: dict[str, Any] = {"prompt": "a red digit seven", "seed": 1, "size": "32x32", "num_inference_steps": 4}
QUICKER: dict[str, Any] = {"prompt": "a blue digit two", "seed": 2, "size": "32x32", "num_inference_steps": 3}
BODIES = (QUICK, QUICKER)
# Pairs of static names that are used together in a request.
PAIRS = ((0, 1), (1, 2), (3, 4), (5, 0), (2, 5))


@dataclass
class Spell:
    """A period in which a name may have stood for a content; None for nothing. The soak of sleep has spells of excuses instead."""

    content: Any
    begins: float
    ends: float = float("inf")


def held_while_asked(spells: list[Spell], asked: Asked) -> set[Any]:
    """Return the contents of all spells that overlap the time from a request to its answer; None is among them if there was nothing."""
    return {spell.content for spell in spells if spell.ends >= asked.begun and spell.begins <= asked.ended}


def write_contents(folder: Path, count: int, seed: int) -> list[Path]:
    """Write `count` adapters of the digits model to the new folders `content-0` and on, each with a different effect; return their
    folders."""
    # Imported late: it takes seconds, and the tests of the judgement do not need it.
    from diffusers import SD3Transformer2DModel

    from support.lora.adapters import write_adapter

    model = SD3Transformer2DModel.from_pretrained(DIGITS_MODEL, subfolder="transformer")
    wanted = ("to_q", "to_v", "to_out.0", "ff.net.2")
    linears = {name: part for name, part in model.named_modules() if name.startswith("transformer_blocks") and name.endswith(wanted)}
    folders = [folder / f"content-{number}" for number in range(count)]
    for number, content in enumerate(folders):
        content.mkdir()
        write_adapter(content, linears, rank=2 + number % 3 * 2, seed=seed * 1000 + number)
    return folders


class References:
    """The contents that each name stood for over time, and reference images that were made without other load, by which answers are judged.

    Real: the worker that makes the images. Without a worker it can only judge.
    """

    def __init__(self, worker: WorkerProcess | None, contents: list[Path], bodies: tuple[dict[str, Any], ...], outcome: Outcome) -> None:
        self.worker, self.contents, self.bodies, self.outcome = worker, contents, bodies, outcome
        weights = [(path / "adapter_model.safetensors").read_bytes() for path in contents]
        self.digests = {f"sha256:{hashlib.sha256(content).hexdigest()}": number for number, content in enumerate(weights)}
        self.spells: dict[str, list[Spell]] = {}
        self.alone: dict[tuple[int, tuple[int, ...]], Any] = {}

    def make_references(self) -> None:
        """Make the images of each adapter alone, and of none, on the idle worker. The adapter `reference` that is used for it is deleted
        afterwards."""
        for content, path in enumerate(self.contents):
            self.require(self.worker.put_adapter("reference", path))
            self.make_alone((content,), ["reference"])
        self.require(self.worker.delete_adapter("reference"))
        self.make_alone((), [])

    def make_alone(self, contents: tuple[int, ...], names: list[str]) -> None:
        """Send each body with the adapters named to the idle worker, and keep the pixels of the answers as references for `contents`."""
        for number, body in enumerate(self.bodies):
            answer = self.worker.request_images(**body, lora=[{"name": name} for name in names])
            self.alone[number, contents] = pixels(self.require(answer).json())

    def require(self, answer: httpx2.Response) -> httpx2.Response:
        """Return an answer that has status 200; raise AssertionError with its text for another status."""
        assert answer.status_code == 200, answer.text
        return answer

    def put_all(self, names: list[str] | tuple[str, ...]) -> None:
        """Put content number i under the i-th name, and begin the spells of the names with it. AssertionError if the worker refuses."""
        for number, name in enumerate(names):
            self.require(self.worker.put_adapter(name, self.contents[number]))
            self.spells[name] = [Spell(number, time.monotonic())]

    def change(self, name: str, content: int | None, *, drain_s: float = 10, **put: Any) -> httpx2.Response:
        """Put another content, or remove the adapter if `content` is None, and return the answer. Until that is done, and where it is
        refused, the name may stand for either."""
        self.spells[name].append(Spell(content, time.monotonic()))
        if content is None:
            answer = self.worker.delete_adapter(name, drainSeconds=drain_s)
        else:
            answer = self.worker.put_adapter(name, self.contents[content], **put)
        if answer.status_code == 200:
            self.changed(name)
        return answer

    def changed(self, name: str) -> None:
        """End all earlier spells of a name now, since its latest change has taken effect."""
        for spell in self.spells[name][:-1]:
            spell.ends = min(spell.ends, time.monotonic())

    def could_be(self, asked: Asked) -> list[set[int | None]]:
        """Return, for each name of a request, the contents that it may have stood for until the answer; None stands for no adapter."""
        return [held_while_asked(self.spells[name], asked) for name in asked.names]

    def why_wrong(self, asked: Asked) -> str | None:
        """Return why an answer's image, or its list of adapters, cannot be that of the requested names; None where it is right. The
        largest difference of an image is kept in the outcome."""
        used = asked.document["data"][0]["provenance"]["adapters"]
        contents, could_be = [self.digests.get(adapter["digest"], -1) for adapter in used], self.could_be(asked)
        right = [adapter["name"] for adapter in used] == asked.names
        if not right or any(content not in could for content, could in zip(contents, could_be, strict=True)):
            return f"{asked.names} were {could_be}: made with {contents}"
        found = pixels(asked.document)
        off = difference(found, self.alone[asked.body, tuple(sorted(contents))])
        self.outcome.worst_difference = max(self.outcome.worst_difference, off)
        if off <= TOLERANCE:
            return None
        near = [key for key, alone in self.alone.items() if difference(found, alone) <= TOLERANCE]
        return f"{asked.names} {contents} body {asked.body}: {off} levels off, the image of {near}, spread {int(np.ptp(found))}"


class AdapterSoak(References):
    """Traffic and changes on one worker. Names are `style-0` and on; the first `STATIC` of them never change.

    Real: the worker and its rank, and the adapters, whose factors are random.
    """

    def __init__(self, worker: WorkerProcess | None, contents: list[Path], *, seed: int, names: int = NAMES) -> None:
        # `nearest` is the least difference of two references; `mib` has the memory before and after, by process.
        outcome = Outcome(seed, counts="not_found evictions loads worst_difference nearest mib", tallies="images churn")
        super().__init__(worker, contents, BODIES, outcome)
        self._rng = random.Random(seed)
        self._names = [f"style-{number}" for number in range(names)]
        self._asking = Asking(lambda: worker.url)

    def prepare(self) -> None:
        """Put all names, and make in advance every image that a request may ask for. References of one body that are hardly different
        are a fault."""
        self.make_references()
        self.put_all(self._names)
        for pair in PAIRS:
            self.make_alone(tuple(sorted(pair)), [self._names[number] for number in pair])
        same_body = [(one, other) for one, other in combinations(self.alone, 2) if one[0] == other[0]]
        self.outcome.nearest = min(difference(self.alone[one], self.alone[other]) for one, other in same_body)
        if self.outcome.nearest < APART:
            self.outcome.wrong.append(f"two references differ by {self.outcome.nearest} levels only")

    def run(self, count: int, *, limit_s: float) -> None:
        """Send `count` random requests from a dozen clients while a thread changes adapters; then judge every answer.

        Requests that have not begun after `limit_s` seconds are left out.
        """
        for asked in self._asking.ask_all([self._choice() for _ in range(count)], self.outcome, limit_s=limit_s, beside=self._change):
            self.judge(asked)

    def _choice(self) -> Asked:
        """Draw a request: 40 % name an adapter as the model, 40 % list one, 15 % list a pair, and 5 % use none."""
        body, kind = self._rng.randrange(len(BODIES)), self._rng.choices(["model", "lora", "pair", "base"], [40, 40, 15, 5])[0]
        one = self._rng.choice(self._names[:HOT] if self._rng.random() < 0.5 else self._names)
        # In random order, which must not matter.
        pair = [self._names[number] for number in self._rng.sample(self._rng.choice(PAIRS), 2)]
        names = {"pair": pair, "base": []}.get(kind, [one])
        more = {"model": one} if kind == "model" else {"lora": [{"name": name} for name in names]} if names else {}
        return Asked(body, names, sent=BODIES[body] | more)

    def judge(self, asked: Asked) -> None:
        """Tally an image by kind, or a 404 if a name may have been absent. Any other answer, and a wrong image, is added to the faults."""
        if asked.status == 404 and any(None in could for could in self.could_be(asked)):
            self.outcome.not_found += 1
        elif asked.status != 200:
            self.outcome.wrong.append(f"{asked.names}: {asked.status} {asked.document}")
        else:
            if why := self.why_wrong(asked):
                self.outcome.wrong.append(why)
            self.outcome.images["model" if "model" in asked.sent else ("base", "lora", "pair")[len(asked.names)]] += 1

    def _change(self, over: threading.Event) -> None:
        """Add, replace and remove adapters, never the first `STATIC`, until the event `over`. A refused change is a fault."""
        churn = self.outcome.churn
        while not over.wait(self._rng.uniform(0.02, 0.25)):
            gone = [name for name in self._names[STATIC:] if self.spells[name][-1].content is None]
            # The first changes remove an adapter and add it again, because on a busy machine there may be few.
            name = self._rng.choice(gone if gone and (not churn["added"] or self._rng.random() < 0.4) else self._names[STATIC:])
            removes = not churn["removed"] or self._rng.random() < 0.3
            what = "added" if self.spells[name][-1].content is None else "removed" if removes else "replaced"
            content = None if what == "removed" else self._rng.randrange(len(self.contents))
            answer = self.change(name, content, drain_s=60, deadlineSeconds=60)
            if answer.status_code != 200:
                self.outcome.wrong.append(f"{what} {name}: {answer.status_code} {answer.text}")
            churn[what] += 1


def run_adapters(folder: Path, count: int, *, seed: int, limit_s: float, names: int = NAMES) -> Outcome:
    """Change adapters on a new worker under `count` requests, and compare its memory after the first tenth with that at the end.
    Adapters and the worker's temporary files go to `folder`."""
    contents = write_contents(folder, names + SPARE_CONTENTS, seed)
    options = (f"--max-loras={SLOTS}", f"--max-cached-loras={CACHED}", "--lora-on-missing=load", "--max-batch-size=8")
    with WorkerProcess(options=options, env={"TMPDIR": str(folder)}) as worker:
        worker.wait_ready()
        soak = AdapterSoak(worker, contents, seed=seed, names=names)
        soak.prepare()
        soak.run(max(1, count // 10), limit_s=limit_s / 4)
        before, outcome = footprint(worker), soak.outcome
        soak.run(count - count // 10, limit_s=limit_s)
        outcome.mib = [[resident // 2**20 for resident, _ in found.values()] for found in (before, footprint(worker))]
        metrics = metric_values(worker.get("/metrics").text)
        outcome.evictions = total(metrics, "diffusion_worker_adapter_evictions_total")
        outcome.loads = total(metrics, 'diffusion_worker_adapter_loads_total{code="OK"}')
        outcome.wrong += left_over(worker, before) + left_at_end(worker, folder)
    return outcome
