# SPDX-License-Identifier: Apache-2.0
"""The requests of the soak of sleep: asked from threads, and judged once it is known what happened meanwhile.

A request is never lost: it has an image that equals its reference, or an error that something which happened while it waited
excuses. Judging is pure; `Times` has what happened.
"""

import enum
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from support.soak.adapters import Spell
from support.soak.adapters import _difference as difference
from support.soak.adapters import _pixels as pixels
from support.soak.traffic import BAD

THREADS = 40
# A wrong request is refused before it is known whether the model can serve; a loaded machine needs a moment for that.
REFUSED_WITHIN_S = 5.0
# Levels of 255: a batch of another size rounds its sums in another order.
TOLERANCE = 2
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a red digit seven", "seed": 1, "size": "32x32", "num_inference_steps": 4},
    {"prompt": "a blue digit two", "seed": 2, "size": "32x32", "num_inference_steps": 9},
)


class Excuse(enum.StrEnum):
    """What may happen while a request waits, and excuses an answer that is no image."""

    # Somebody asked for a sleep, or declared the policy, under which requests are refused.
    ASKED = "asked to sleep"
    # A sleep ended what ran, at once or when the time for its drain was over.
    ENDED = "sleep ended it"
    KILLED = "a rank was lost"
    DOWN = "the server was killed"


# The codes that each of them allows. Without an excuse a good request gets its image.
ALLOWED: dict[Excuse, frozenset[str]] = {
    Excuse.ASKED: frozenset({"Asleep"}),
    Excuse.ENDED: frozenset({"Asleep"}),
    Excuse.KILLED: frozenset({"RankFailed"}),
    Excuse.DOWN: frozenset({"no connection"}),
}
# Where a name stood for nothing for a while; the last is told while it comes back.
NO_SUCH_ADAPTER = frozenset({"NotFound", "AdapterRemoved", "AdapterNotLoaded"})


class Times:
    """When each excuse held."""

    def __init__(self) -> None:
        self._spans: dict[Excuse, list[tuple[float, float]]] = {excuse: [] for excuse in Excuse}

    def begin(self, excuse: Excuse) -> None:
        """From now on, unless it holds already."""
        spans = self._spans[excuse]
        if not spans or spans[-1][1] < float("inf"):
            spans.append((time.monotonic(), float("inf")))

    def end(self, excuse: Excuse) -> None:
        """No more."""
        spans = self._spans[excuse]
        if spans and spans[-1][1] == float("inf"):
            spans[-1] = (spans[-1][0], time.monotonic())

    def holds(self, excuse: Excuse) -> bool:
        """Whether it does now."""
        return bool(self._spans[excuse]) and self._spans[excuse][-1][1] == float("inf")

    def between(self, begun: float, ended: float) -> set[Excuse]:
        """Those that held at some time of these."""
        return {excuse for excuse, spans in self._spans.items() if any(since <= ended and until >= begun for since, until in spans)}


@dataclass
class Asked:
    """One request and what became of it. `body` is the index in `BODIES`, None for a wrong one, whose status is `expected`."""

    body: int | None
    names: list[str]
    begun: float
    # How many others were without an answer at some time while it was.
    beside: int = 0
    expected: int = 200
    gone: bool = False
    ended: float = 0.0
    status: int = 0
    code: str = ""
    document: dict[str, Any] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    worst: int = 0


class Asking:
    """Clients in threads; `asked` has all since it was last emptied."""

    def __init__(self, url: Callable[[], str], *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS)
        self._http = httpx2.Client(timeout=timeout_s, limits=httpx2.Limits(max_connections=THREADS * 2, max_keepalive_connections=0))
        self.asked: list[Asked] = []
        self._running: list[Future[None]] = []

    def image(self, body: int, names: list[str], *, stream: bool = False, gone_after_s: float | None = None) -> None:
        """Ask for one, with adapters; its client may go away before it is there."""
        asked = Asked(body, names, time.monotonic(), gone=gone_after_s is not None)
        lora = [{"name": name} for name in names]
        self._send(asked, {**BODIES[body], "lora": lora, "stream": stream}, gone_after_s)

    def wrong(self, number: int) -> None:
        """One that nothing can answer."""
        body, status = BAD[number]
        self._send(Asked(None, [], time.monotonic(), expected=status), body, None)

    def wait(self, timeout_s: float) -> None:
        """Until all have their answer, or the time is over."""
        wait(self._running, timeout_s)

    def answers(self, timeout_s: float) -> list[Asked]:
        """All since the last time, each with its answer; those without one after that time have status 0."""
        self.wait(timeout_s)
        found, self.asked, self._running = self.asked, [], []
        for asked in found:
            until = asked.ended or float("inf")
            asked.beside = sum(other.begun <= until and (other.ended or until) >= asked.begun for other in found) - 1
        return found

    def close(self) -> None:
        """After the worker has ended, so that no thread waits any more."""
        self._threads.shutdown(cancel_futures=True)
        self._http.close()

    def _send(self, asked: Asked, body: dict[str, Any], gone_after_s: float | None) -> None:
        self.asked.append(asked)
        self._running.append(self._threads.submit(self._ask, asked, body, gone_after_s))

    def _ask(self, asked: Asked, body: dict[str, Any], gone_after_s: float | None) -> None:
        timeout = self._timeout_s if gone_after_s is None else httpx2.Timeout(self._timeout_s, read=gone_after_s)
        url = f"{self._url()}/v1/images/generations"
        try:
            if body.get("stream"):
                self._listen(asked, url, body, timeout)
            else:
                answer = self._http.post(url, json=body, timeout=timeout)
                asked.status, asked.document = answer.status_code, answer.json()
        except httpx2.TimeoutException:
            asked.code = "no answer"
        except httpx2.TransportError:
            asked.code = "no connection"
        asked.code = asked.code or str(asked.document.get("error", {}).get("code", ""))
        asked.ended = time.monotonic()

    def _listen(self, asked: Asked, url: str, body: dict[str, Any], timeout: Any) -> None:
        with self._http.stream("POST", url, json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                asked.status, asked.document = answer.status_code, answer.json()
                return
            events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
        asked.held = [event["state"] for event in events if event["type"].endswith(".held")]
        last = events[-1] if events else {}
        if str(last.get("type", "")).endswith(".completed"):
            asked.status, asked.document = 200, {"data": [last]}
        else:
            # An error after the stream began; its status has gone out already.
            asked.status, asked.document = 500, last


@dataclass
class Judge:
    """What answers are compared with: references by body and adapters' contents, and what each name stood for when."""

    references: Mapping[tuple[int, tuple[int, ...]], Any]
    digests: Mapping[str, int]
    spells: Mapping[str, Sequence[Spell]]
    max_held: int

    def why_wrong(self, asked: Asked, times: Times) -> str | None:
        """None where the answer is right, or excused."""
        if asked.gone and asked.code == "no answer":
            return None
        ended = asked.ended or float("inf")
        excuses = times.between(asked.begun, ended)
        if asked.status == 200 and asked.body is not None:
            return self._why_not_this(asked)
        if asked.body is None:
            return self._why_not_refused(asked, excuses)
        could_be = [self._could_be(name, asked) for name in asked.names]
        allowed = frozenset[str]().union(*(ALLOWED[excuse] for excuse in excuses))
        if any(None in contents for contents in could_be):
            allowed |= NO_SUCH_ADAPTER
        if asked.beside >= self.max_held:
            allowed |= {"Overloaded"}
        return None if asked.code in allowed else f"{self._told(asked)}, and what happened meanwhile is {sorted(excuses)}"

    def _why_not_refused(self, asked: Asked, excuses: set[Excuse]) -> str | None:
        if asked.code == "no connection" and Excuse.DOWN in excuses:
            return None
        seconds = asked.ended - asked.begun
        at_once = seconds < REFUSED_WITHIN_S or excuses & {Excuse.KILLED, Excuse.DOWN}
        return None if asked.status == asked.expected and at_once else f"{self._told(asked)} after {seconds:.1f} s"

    def _why_not_this(self, asked: Asked) -> str | None:
        used = asked.document["data"][0]["provenance"]["adapters"]
        contents = [self.digests.get(adapter["digest"], -1) for adapter in used]
        could_be = [self._could_be(name, asked) for name in asked.names]
        if len(contents) != len(could_be) or any(content not in could for content, could in zip(contents, could_be, strict=True)):
            return f"{asked.names} were {could_be}: made with {contents}"
        found = pixels(asked.document)
        asked.worst = difference(found, self.references[asked.body or 0, tuple(sorted(contents))])
        if asked.worst <= TOLERANCE:
            return None
        near = [key for key, alone in self.references.items() if difference(found, alone) <= TOLERANCE]
        level = int(np.ptp(found))
        return f"{asked.names} {contents} body {asked.body}: {asked.worst} levels off, the image of {near}, spread {level}"

    def _could_be(self, name: str, asked: Asked) -> set[int | None]:
        return {spell.content for spell in self.spells[name] if spell.ends >= asked.begun and spell.begins <= asked.ended}

    def _told(self, asked: Asked) -> str:
        found = asked.document.get("error", {}).get("message", "")
        return f"body {asked.body} {asked.names}: expected {asked.expected}, found {asked.status} {asked.code} {found}"
