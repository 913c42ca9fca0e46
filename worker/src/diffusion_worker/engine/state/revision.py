# SPDX-License-Identifier: Apache-2.0
"""The revision of the state document, and the wait for the next one.

A revision is `bootId.n`, so the same text never stands for two lives of the server. Changes have weights. A change of state, a
request that begins to be held, and work for one more replica make a new revision at once. Records of adapters alone do so at most every
two seconds, or sooner where there are few of them, because a client is sent all of them each time. Counters alone do so every
`COUNTERS_S`. Ages never do: the client dates the document when it receives it.
"""

import asyncio
import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from diffusion_worker.engine.state.state_document import AdapterDocument, StateDocument
from diffusion_worker.errors import ErrorCode, RequestError

COUNTERS_S = 15.0
RECORDS_S = 2.0
# Seconds between two answers for each adapter that they list: thousands of them load without a pause in what they report.
RECORD_S = 0.0005
# The longest pause between two looks for a waiting client, as adapters and ranks change without a signal.
LOOK_S = 0.5
MOST_WATCHERS = 8


class Signal:
    """A signal that the state may have changed: all waiters look again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all current waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next signal, for at most `timeout_s` seconds; return without an error in either case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class Weight(enum.IntEnum):
    """The urgency of a difference between two states: none, only counters, records of adapters, or a change that all hear of at once."""

    NONE = 0
    COUNTERS = 1
    RECORDS = 2
    PROMPT = 3


class Look(NamedTuple):
    """A state in the form that is compared: `said` without ages and counters. An element of `wishes` counts only if it grows."""

    said: bytes
    counters: bytes
    wishes: tuple[int, ...] = ()

    def weight_after(self, before: "Look | None") -> Weight:
        """Return PROMPT if `said` differs, a wish grew, or there is no earlier look.

        Otherwise return COUNTERS if a counter differs or a wish shrank, or else NONE.
        """
        if before is None or self.said != before.said or any(now > then for now, then in zip(self.wishes, before.wishes, strict=True)):
            return Weight.PROMPT
        return Weight.COUNTERS if (self.counters, self.wishes) != (before.counters, before.wishes) else Weight.NONE


def look_at(document: StateDocument, *, last_request_at_s: float | None, batches: int) -> Look:
    """Return the comparable form of a document that has no adapters: ages left out, counters apart.

    `batches` is the work of all requests, in model calls of the largest batch; only more than before counts.
    """
    said = msgspec.structs.replace(
        document,
        operation=document.operation and msgspec.structs.replace(document.operation, age_seconds=0.0),
        in_flight=0,
        queued=0,
        last_request_age_seconds=None,
        load=msgspec.structs.replace(document.load, bytes_done=0),
        ranks=[
            msgspec.structs.replace(
                one, last_progress_age_seconds=None, memory=type(one.memory)(asleep=one.memory.asleep, level=one.memory.level)
            )
            for one in document.ranks
        ],
        last_loss=document.last_loss and msgspec.structs.replace(document.last_loss, age_seconds=0.0),
        state_age_seconds=0.0,
        held=type(document.held)(),
        standby_ranks=0,
        revision="",
    )
    memory = [one.memory for one in document.ranks]
    requests = (document.in_flight, document.queued, document.held.current, last_request_at_s)
    counters = (*requests, document.load.bytes_done, memory, document.standby_ranks)
    drained = document.draining and not (document.in_flight or document.queued or document.held.current)
    # A replica serves the first batch itself, so only further ones count. A client may wait for the end of a drain.
    wishes = (min(1, document.held.current), max(1, batches), int(drained))
    return Look(msgspec.json.encode(said), msgspec.json.encode(counters), wishes)


def look_at_adapter(document: AdapterDocument) -> Look:
    """Return the comparable form of the record of one adapter: counters apart, without the age of its last request."""
    said = msgspec.structs.replace(document, refs=0, requests_total=0, last_request_age_seconds=None, fetched_bytes=None, total_bytes=None)
    return Look(msgspec.json.encode(said), msgspec.json.encode((document.refs, document.requests_total, document.fetched_bytes)))


class Revision:
    """The count of published changes of one engine's state, for which watchers wait.

    `look` returns the state without its adapters. `touched` returns the adapters that may have changed, each with its record, or None if it
    is gone. `settled` takes the adapters that did not change, or whose change is published.
    """

    def __init__(
        self,
        boot_id: str,
        signal: Signal,
        *,
        look: Callable[[], Look],
        touched: Callable[[], Iterable[tuple[Any, AdapterDocument | None]]],
        settled: Callable[[Iterable[Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._boot_id = boot_id
        self._signal = signal
        self._look = look
        self._touched = touched
        self._settled = settled
        self._clock = clock
        self._number = 0
        self._published: Look | None = None
        self._published_at_s = 0.0
        self._adapters: dict[object, Look] = {}
        self._watchers = 0
        self._ended = False

    def current(self, *, paced: bool = False) -> str:
        """Compare the state with the published one, publish a new revision if it differs, and return the current revision.

        Counters alone never make one unless `paced`. Then they do so `COUNTERS_S` after the last revision, and records of adapters after
        a pause that grows with their number.
        """
        now, adapters, weight = self._compare()
        records_s = min(RECORDS_S, RECORD_S * len(self._adapters))
        pauses_s = {Weight.NONE: math.inf, Weight.COUNTERS: COUNTERS_S, Weight.RECORDS: records_s, Weight.PROMPT: 0.0}
        due = self._clock() - self._published_at_s >= pauses_s[weight] if paced else weight > Weight.COUNTERS
        if due:
            self._publish(now, adapters)
        return f"{self._boot_id}.{self._number}"

    async def wait_for_other(self, after: str, wait_s: float) -> None:
        """Wait until the revision differs from `after`, the time is over, or the server ends.

        Raises:
            RequestError: Overloaded, too many clients wait already.
        """
        if self._watchers >= MOST_WATCHERS:
            message = f"expected at most {MOST_WATCHERS} clients that wait for a change of the state, found {self._watchers} already"
            raise RequestError(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        self._watchers += 1
        try:
            ends_s = self._clock() + wait_s
            while not self._ended and self.current(paced=True) == after and (left_s := ends_s - self._clock()) > 0:
                await self._signal.wait(min(left_s, LOOK_S))
        finally:
            self._watchers -= 1

    def end(self) -> None:
        """End all waits, and let later ones return at once, as the server ends."""
        self._ended = True
        self._signal.notify()

    def _compare(self) -> tuple[Look, dict[object, Look | None], Weight]:
        now = self._look()
        weight, changed, same = now.weight_after(self._published), {}, []
        for adapter, document in self._touched():
            look, before = look_at_adapter(document) if document is not None else None, self._adapters.get(adapter)
            differs = look.weight_after(before) if look is not None else Weight.PROMPT if before is not None else Weight.NONE
            if differs is Weight.NONE:
                same.append(adapter)
            else:
                changed[adapter] = look
            weight = max(weight, min(differs, Weight.RECORDS))
        self._settled(same)
        return now, changed, weight

    def _publish(self, now: Look, adapters: dict[object, Look | None]) -> None:
        self._number += 1
        self._published, self._published_at_s = now, self._clock()
        for adapter, look in adapters.items():
            if look is None:
                del self._adapters[adapter]
            else:
                self._adapters[adapter] = look
        self._settled(adapters)
