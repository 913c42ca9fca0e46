# SPDX-License-Identifier: Apache-2.0
"""The frame of all parts of `make soak`: the outcome of a run, its clients, the actions beside them, and the measurements.

Real: requests over HTTP to the worker of a part. Not real: the applications, which are threads.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np

from support.worker.process import WorkerProcess, decode_image

CLIENTS = 12
ANSWER_TIMEOUT_S = 180.0
# The codes of requests that got no status.
NO_STATUS = {httpx2.TimeoutException: "no answer", httpx2.TransportError: "no connection", Exception: "no document"}


class Outcome(SimpleNamespace):
    """The result of a run: the number of requests done, the seconds, the faults in words, and more fields of counts and tallies."""

    def __init__(self, seed: int, *, counts: str = "", tallies: str = "", **others: Any) -> None:
        fields = dict.fromkeys(counts.split(), 0) | {name: Counter[str]() for name in tallies.split()} | others
        super().__init__(seed=seed, done=0, **fields, seconds=0.0, wrong=[])

    def until(self, count: float, limit_s: float) -> Iterator[int]:
        """Yield the number done so far, until it reaches `count` or the time is over."""
        started = time.monotonic()
        try:
            while self.done < count and time.monotonic() - started < limit_s:
                yield self.done
        finally:
            self.seconds = time.monotonic() - started

    def document(self) -> dict[str, Any]:
        """Return all fields, with floats rounded."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in vars(self).items()}

    def line(self, name: str, wanted: int) -> str:
        """Return all fields as one line of JSON after the name. If fewer than `wanted` are done, the line says that the time was over."""
        cut = "" if self.done >= wanted else f" (the time was over after {self.done} of {wanted})"
        return f"{name}{cut}: {json.dumps(self.document())}"


def those_that_hold(wrong: dict[str, Any]) -> list[str]:
    """Return the sentences whose value is true."""
    return [what for what, holds in wrong.items() if holds]


def metric_values(text: str) -> dict[str, float]:
    """Parse Prometheus' text format into values keyed by `name{labels}`, exactly as written. Comment lines are skipped."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def total(values: dict[str, float], name: str) -> int:
    """Return the sum of the values whose name and labels begin with `name`."""
    return int(sum(value for found, value in values.items() if found.startswith(name)))


def signal_rank(worker: WorkerProcess, rank: int, number: signal.Signals) -> bool:
    """Send a signal to a running rank, of which `rank` is the number modulo their count. Return False if no rank runs."""
    pids = [one["pid"] for one in worker.state()["ranks"] if one["pid"]]
    with suppress(ProcessLookupError):  # the group of ranks is being ended already
        if pids:
            os.kill(pids[rank % len(pids)], number)
    return bool(pids)


@dataclass
class Asked:
    """A request and its answer.

    `body` is the index of its body among those of the soak. It is None for a wrong request, which must get the status `expected`.
    """

    body: int | None
    names: list[str]
    begun: float = 0.0
    sent: dict[str, Any] = field(default_factory=dict)
    expected: int = 200
    # Seconds after which the client goes away; None: never.
    gone_after_s: float | None = None
    # The number of other requests that were in flight at the same time.
    beside: int = 0
    ended: float = float("inf")
    status: int = 0
    code: str = ""
    document: dict[str, Any] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


class Asking:
    """A number of clients of a worker, whose address may change."""

    def __init__(self, url: Callable[[], str], *, clients: int = CLIENTS, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._http = httpx2.Client(limits=httpx2.Limits(max_connections=2 * clients, max_keepalive_connections=0))
        self._threads = ThreadPoolExecutor(clients)
        self._asked: list[Asked] = []
        self._running: list[Future[None]] = []

    def send(self, asked: Asked, *, ends: float = float("inf")) -> None:
        """Send a request as soon as a client is free, unless the time is over by then."""
        self._asked.append(asked)
        self._running.append(self._threads.submit(self._ask, asked, ends))

    def ask_all(self, requests: list[Asked], outcome: Outcome, *, limit_s: float, beside: Callable[[Event], None]) -> list[Asked]:
        """Send requests until all are answered or the time is over, while `beside` runs in a thread until its event. An error in that
        thread is a fault."""
        started, over = time.monotonic(), Event()
        for asked in requests:
            self.send(asked, ends=started + limit_s)
        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(beside, over)
            try:
                answered = self.answers()
            finally:
                over.set()
        if error := working.exception():
            outcome.wrong.append(f"what went on beside it ended: {error!r}")
        outcome.done += len(answered)
        outcome.seconds += time.monotonic() - started
        return answered

    def wait(self, timeout_s: float | None) -> None:
        """Block until every request sent since the last `answers` has ended, or `timeout_s` passes; None waits for ever. It raises no
        error of a request."""
        wait(self._running, timeout_s)

    def answers(self, timeout_s: float | None = None) -> list[Asked]:
        """Wait, and return the requests begun since the last call; those without an answer have status 0."""
        self.wait(timeout_s)
        found, self._asked, self._running = [asked for asked in self._asked if asked.begun], [], []
        return found

    def _ask(self, asked: Asked, ends: float) -> None:
        if time.monotonic() > ends:
            return
        asked.begun = asked.begun or time.monotonic()
        timeout = httpx2.Timeout(self._timeout_s, read=asked.gone_after_s or self._timeout_s)
        try:
            with self._http.stream("POST", f"{self._url()}/v1/images/generations", json=asked.sent, timeout=timeout) as answer:
                self._read(asked, answer)
        except (httpx2.RequestError, ValueError) as error:
            asked.code = next(code for kind, code in NO_STATUS.items() if isinstance(error, kind))
            asked.document = {"error": {"message": repr(error)}}
        asked.code = asked.code or str(asked.document.get("error", {}).get("code", ""))
        asked.ended = time.monotonic()

    def _read(self, asked: Asked, answer: httpx2.Response) -> None:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.read()
            asked.status, asked.document = answer.status_code, answer.json()
            return
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
        asked.held = [event["state"] for event in events if event["type"].endswith(".held")]
        last = events[-1] if events else {}
        complete = str(last.get("type", "")).endswith(".completed")
        # An error after the stream began is its last event, since the status has been sent already.
        asked.status, asked.document = (200, {"data": [last]}) if complete else (500, last)


def pixels(document: dict[str, Any]) -> Any:
    """Decode the first image in an API answer to integers, height by width by channels. They are signed, so that differences do not wrap
    around."""
    return np.asarray(decode_image(document["data"][0]["b64_json"])).astype(int)


def difference(one: Any, other: Any) -> int:
    """Return the largest difference of two images, in levels of 255; 255 if their shapes differ."""
    return 255 if one.shape != other.shape else int(np.abs(one - other).max())
