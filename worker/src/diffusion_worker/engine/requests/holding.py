# SPDX-License-Identifier: Apache-2.0
"""Requests for a model that cannot serve them yet: held in order, or refused with a time to come back.

`decide` judges one request, purely. `Holding` lets held requests wait, tells them their place, and asks for a wake if the policy lets a
request bring one. A request is authenticated and validated before it comes here.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.engine.state.lifecycle import ENDING, REFUSALS
from diffusion_worker.engine.state.request_events import Held, RequestEvent
from diffusion_worker.engine.state.state_document import ColdMode, ColdRequests, EngineState, HeldDocument, SleepPolicy
from diffusion_worker.errors import ErrorCode, RequestError

log = logging.getLogger(__name__)

# Suggested wait where a state does not say when it ends: a wake is a matter of seconds.
RETRY_AFTER_S = 5.0
# Interval of reporting places to held requests and of reading the policy: both may change while the state does not.
LOOK_S = 0.5
TO_SLEEP = (EngineState.DRAINING, EngineState.SLEEPING, EngineState.ASLEEP)


class NoLongerServing(Exception):
    """The end of a model's service before an admitted request has its adapters; no rank has seen the request.

    It is then held or refused like a new one.
    """


class HeldOutcome(enum.StrEnum):
    """The outcome of a request for a cold model: served after its wait, held for too long, too many held, cancelled, or refused."""

    SERVED = "served"
    TIMED_OUT = "timed_out"
    OVERLOADED = "overloaded"
    GONE = "gone"
    REFUSED = "refused"


class ColdSituation(msgspec.Struct, frozen=True):
    """A moment's states, sleep policy and limits of cold requests, from which a request's fate follows without asking the engine."""

    state: EngineState
    state_after_restart: EngineState
    policy: SleepPolicy
    cold: ColdRequests

    @property
    def serves(self) -> bool:
        """Return whether the state is READY, in which a request neither waits nor is refused."""
        return self.state is EngineState.READY

    @property
    def cold_state(self) -> EngineState:
        """The state that decides on requests: `ASLEEP` also for a group that starts, or is started again, only to sleep."""
        restarts_to_sleep = self.state is EngineState.RESTARTING and self.state_after_restart in TO_SLEEP
        # With policy Asleep the model loads only to sleep.
        loads_to_sleep = self.state is EngineState.STARTING and self.policy is SleepPolicy.ASLEEP
        return EngineState.ASLEEP if restarts_to_sleep or loads_to_sleep else self.state

    @property
    def wakes(self) -> bool:
        """Return whether a request wakes the model: its policy is OnIdle, and it sleeps or is on its way to sleep."""
        return self.cold_state in TO_SLEEP and self.policy is SleepPolicy.ON_IDLE


def decide(now: ColdSituation, held: int) -> RequestError | None:
    """Return the error of a request that may not wait beside `held` others; None if it may wait or need not."""
    if now.serves:
        return None
    if (error := why_gone(now)) is not None:
        return error
    if now.cold.mode is ColdMode.REJECT:
        return refusal(now, "is refused and not held, because coldRequests.mode is Reject")
    if held >= now.cold.max_held:
        why = REFUSALS[now.cold_state][1]
        message = f"expected at most {now.cold.max_held} requests that wait for the model, found {held} already: {why}"
        return RequestError(ErrorCode.OVERLOADED, message, retry_after_s=_retry_after_s(now))
    return None


def why_gone(now: ColdSituation) -> RequestError | None:
    """Return the error of requests that would wait in vain, as the worker ends or the model is to stay asleep; else None."""
    if now.cold_state in ENDING or (now.cold_state in TO_SLEEP and not now.wakes):
        code, why, retry_after_s = REFUSALS[now.cold_state]
        lasting = code is ErrorCode.ASLEEP and now.policy is SleepPolicy.ASLEEP  # no repetition wakes it
        return RequestError(code, f"this request is refused: {why}", retry_after_s=retry_after_s, lasting=lasting)
    return None


def refusal(now: ColdSituation, what: str) -> RequestError:
    """Build the RequestError `this request <what>: <why>`; its code follows from the cold state, and `retry_after_s` is always set."""
    code, why, _ = REFUSALS[now.cold_state]
    return RequestError(code, f"this request {what}: {why}", retry_after_s=_retry_after_s(now))


def _retry_after_s(now: ColdSituation) -> float:
    return REFUSALS[now.cold_state][2] or RETRY_AFTER_S


class Rules(Protocol):
    """The current rules of sleep, see `sleep.policy.SleepRules`."""

    @property
    def policy(self) -> SleepPolicy:
        """The sleep policy."""

    @property
    def cold_requests(self) -> ColdRequests:
        """Mode, highest number and longest time for requests that find the model loading, asleep or waking."""


class Life(Protocol):
    """The engine's state, see `state.lifecycle.EngineLife`."""

    @property
    def state(self) -> EngineState:
        """The state for clients: RESTARTING hides the one behind it until the ranks are back."""

    @property
    def state_after_restart(self) -> EngineState:
        """The state behind RESTARTING, which follows once the ranks are back; the same as `state` at all other times."""

    async def wait_for_change(self) -> None:
        """Block until `state` has a new value; changes before the call do not count."""


class HoldBudget:
    """The seconds for which a request was held so far, and its listener. It may be held more than once, and all waits count together."""

    def __init__(self, on_event: Callable[[RequestEvent], None] | None = None) -> None:
        self.on_event = on_event
        self.held_s = 0.0


class HeldRequest(msgspec.Struct, eq=False):
    """A held request. `go` ends with None when it may look whether the model serves, or with the error that ends the request."""

    go: "asyncio.Future[Exception | None]"
    on_event: Callable[[RequestEvent], None] | None
    since_s: float
    deadline_s: float
    told: Held | None = None
    outcome: HeldOutcome = HeldOutcome.REFUSED

    def tell(self, event: Held) -> None:
        """Notify the listener if the event is a new one. An exception from the listener ends the request."""
        if self.on_event is None or event == self.told or self.go.done():
            return
        self.told = event
        try:
            self.on_event(event)
        except Exception as error:
            self.end(error, HeldOutcome.REFUSED)

    def end(self, error: Exception, outcome: HeldOutcome) -> None:
        """End the request with an error, unless it may go already."""
        if not self.go.done():
            self.outcome = outcome
            self.go.set_result(error)


class Holding:
    """The held requests of one engine, first come, first served. `wake` asks for a wake, returns at once and may be repeated."""

    def __init__(
        self,
        life: Life,
        rules: Rules,
        *,
        wake: Callable[[], None],
        on_held: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up without requests; `on_held` is called for every request that begins to wait."""
        self.outcomes = Counter[HeldOutcome]()
        self.waited = Durations()
        self._life = life
        self._rules = rules
        self._wake = wake
        self._on_held = on_held
        self._clock = clock
        self._numbers = itertools.count()
        # Places by number, so that leaving from the middle costs no more than leaving first.
        self._places: dict[int, HeldRequest] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def current(self) -> int:
        """Length of the queue of requests that wait for the model to serve; `max_held` is compared with it."""
        return len(self._places)

    def document(self) -> HeldDocument:
        """Return the number of waiting requests, and the seconds that the first of them has waited, None if there is none."""
        first = next(iter(self._places.values()), None)
        return HeldDocument(self.current, None if first is None else round(self._clock() - first.since_s, 3))

    async def admit(self, turn: HoldBudget) -> None:
        """Wait until the model serves and all earlier requests have gone. The caller may then await nothing before it reaches the ranks.

        Raises:
            RequestError: Overloaded, and the codes of the states. Any error that the request's `on_event` raises.
        """
        if self._life.state is EngineState.READY and not self._places:
            return
        now = self._situation()
        if (error := decide(now, self.current)) is not None:
            self.outcomes[HeldOutcome.OVERLOADED if error.code is ErrorCode.OVERLOADED else HeldOutcome.REFUSED] += 1
            if now.wakes:
                self._wake()
            raise error
        await self._held(turn, now)

    async def _held(self, turn: HoldBudget, now: ColdSituation) -> None:
        number, arrived_s = next(self._numbers), self._clock()
        place = HeldRequest(_future(), turn.on_event, arrived_s, arrived_s + now.cold.hold_timeout_seconds - turn.held_s)
        ahead = self.current
        self._places[number] = place
        try:
            self._begin(place, ahead, now)
            await self._turn_of(place)
            place.outcome = HeldOutcome.SERVED
        except asyncio.CancelledError:
            place.outcome = HeldOutcome.GONE
            raise
        finally:
            del self._places[number]
            held_s = self._clock() - arrived_s
            turn.held_s += held_s
            self.waited.observe(held_s)
            self.outcomes[place.outcome] += 1
            self._left()

    def _begin(self, place: HeldRequest, ahead: int, now: ColdSituation) -> None:
        """Start a request's wait: notify its listener, and wake the model if the policy says so."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if not now.serves:
            place.tell(Held(now.cold_state, ahead))
        if now.wakes:
            self._wake()
        self._on_held()

    def _left(self) -> None:
        """Let the next request go, or stop watching if there is none."""
        if self._places:
            self._release()
        elif self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _turn_of(self, place: HeldRequest) -> None:
        """Wait until a request may go while the model serves. It keeps its place if the model sleeps again before."""
        while True:
            if (error := await place.go) is not None:
                raise error
            if self._situation().serves:
                return
            place.go = _future()

    async def _watch(self) -> None:
        """Look again whenever something may have changed. A defect here ends all held requests, as nothing else does."""
        try:
            while True:
                self.look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._life.wait_for_change()
        except Exception as error:
            log.exception("the task that watches held requests failed, and they all end")
            self._watching = None
            for place in self._places.values():
                place.end(error, HeldOutcome.REFUSED)

    def _pause_s(self) -> float:
        """Return the seconds to the nearest deadline of a held request, no more than LOOK_S; 0 if it has passed or none is held."""
        first_s = min((place.deadline_s for place in self._places.values()), default=0.0)
        return max(0.0, min(LOOK_S, first_s - self._clock()))

    def look(self) -> None:
        """Let the first held request go if the model serves. Otherwise end those that wait in vain or too long, and notify the rest.

        A listener is only called if its place or the state changed. The model is woken if the policy lets requests wake it.
        """
        now = self._situation()
        if now.serves:
            self._release()
            return
        now_s, ahead = self._clock(), 0
        for place in self._places.values():
            if (error := why_gone(now)) is not None:
                place.end(error, HeldOutcome.REFUSED)
            elif now_s >= place.deadline_s:
                what = f"was held for the longest time allowed, {now.cold.hold_timeout_seconds:g} s"
                place.end(refusal(now, what), HeldOutcome.TIMED_OUT)
            else:
                place.tell(Held(now.cold_state, ahead))
                ahead += 1
        if ahead and now.wakes:
            self._wake()

    def _release(self) -> None:
        """Let the first request go; the next one follows when it has left, so they reach the ranks in order."""
        first = next(iter(self._places.values()), None)
        if first is not None and not first.go.done() and self._situation().serves:
            first.go.set_result(None)

    def _situation(self) -> ColdSituation:
        return ColdSituation(self._life.state, self._life.state_after_restart, self._rules.policy, self._rules.cold_requests)


def _future() -> "asyncio.Future[Exception | None]":
    return asyncio.get_running_loop().create_future()
