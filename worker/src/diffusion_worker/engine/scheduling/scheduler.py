# SPDX-License-Identifier: Apache-2.0
"""Choice of the requests that take the next step. Pure: requests and reports in, ticks out, time as a parameter.

Requests wait in a queue for each class of alike ones (`RequestClass`), and a single class takes each step. It takes the number of requests
that makes images cheapest (`CostCurve`) and fits in memory (`MemoryModel`). The class that can finish an image soonest goes first, so a
small request never waits for all of a large one. Pausing between two steps costs nothing. A class whose oldest request has waited for a
multiple of its own time gets a guaranteed share of the device, so nobody starves. Within a class requests are served in order of arrival,
except those whose adapters do not fit in the slots beside the others' (`AdapterSlots`).

Ticks are decided before earlier ones are reported, so the state here follows the ticks that were sent.
"""

import itertools
from collections import deque

import msgspec

from diffusion_worker.engine.scheduling.adapter_slots import AdapterSlots
from diffusion_worker.engine.scheduling.memory_model import MemoryModel
from diffusion_worker.engine.scheduling.request_class import Defaults, RequestClass, class_of
from diffusion_worker.engine.scheduling.request_queue import ClassQueue, QueuedRequest, RunLengthKey, RunLengths
from diffusion_worker.engine.scheduling.residents import Residents
from diffusion_worker.engine.scheduling.step_costs import StepCosts
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import RequestSpec, Tick, TickDone, WarmTick

# Share of the device for all classes together whose requests have waited too long.
SHARE = 0.25
# A request has waited too long after this multiple of the time that it takes alone.
PATIENCE = 2.0
# Requests of a class that one choice may pass because their adapters have no slots.
LOOKAHEAD = 256


class SentTick(msgspec.Struct, frozen=True):
    """A tick without a report yet: its class and its requests, of which `denoising` are expected to call the denoiser.

    `beside` counts the other requests that were with the ranks, which held `beside_bytes` by estimate.
    """

    number: int
    kind: RequestClass | None
    requests: list[QueuedRequest]
    denoising: int
    beside: int = 0
    beside_bytes: int = 0


class TickEstimate(msgspec.Struct, frozen=True):
    """Estimate of the tick that the ranks work on.

    `step_s` is the measured time of a step of its size, scaled from other sizes without `same_class`, and None without any. `once_s` is the
    time for all that comes once in a request or a class, such as encoders, decoding and compilation.
    """

    phase: str
    steps: int
    step_s: float | None
    same_class: bool
    once_s: float = 0.0


class StepScheduler:
    """Waiting and running requests of one rank group, and the tick that moves some of them on."""

    def __init__(self, max_batch_size: int, *, slots: int = 1, window_s: float = 0.0) -> None:
        """Begin without requests, measured costs or a known size of memory.

        `max_batch_size` limits a step. `slots` limits the adapters of all requests on the ranks together. `window_s` is the time in seconds
        for which a class that has not started waits for more requests.
        """
        self.memory = MemoryModel()
        self._slots = AdapterSlots(slots)
        # Requests that the last choice passed because their adapters had no slots.
        self._passed: list[QueuedRequest] = []
        self._max_batch_size = max_batch_size
        self._window_s = window_s
        self._defaults = Defaults()
        self._costs = StepCosts()
        self._lengths = RunLengths()
        self._requests: dict[str, QueuedRequest] = {}
        self._queues: dict[RequestClass, ClassQueue] = {}
        self._residents = Residents(max_batch_size)
        # Requests that are to run while no other is with the ranks, by their ids, in that order.
        self._alone: dict[str, QueuedRequest] = {}
        self._leaving: list[str] = []
        self._sent: deque[SentTick] = deque()
        self._tick_numbers = itertools.count(1)
        self._arrivals = itertools.count()

    @property
    def waiting(self) -> int:
        """Requests that have not joined yet."""
        return len(self._requests) - self._residents.count

    @property
    def running(self) -> int:
        """Requests on the ranks."""
        return self._residents.count

    @property
    def active_adapters(self) -> int:
        """Adapters of the requests on the ranks."""
        return self._slots.active

    @property
    def in_flight(self) -> int:
        """Ticks that were sent and not reported."""
        return len(self._sent)

    def describe(self, defaults: Defaults, free_bytes: int) -> None:
        """Set the model's defaults for requests, and the memory for them; call it before the first request."""
        self._defaults = defaults
        self.memory.free_bytes = free_bytes

    def warmed_up(self, ticks: list[WarmTick]) -> None:
        """Take what ticks of the warm-up took, for deadlines of sizes that were not measured since."""
        for tick in ticks:
            self._costs.warmed_up(class_of(tick.spec, self._defaults), tick)

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Queue a request in its class, with `now_s` as its time of arrival; its id must not be queued already."""
        kind = class_of(spec, self._defaults)
        length = self._lengths.of(self._course(spec))
        adapters = frozenset(use.lora_int_id for use in spec.loras)
        request = QueuedRequest(spec, kind, now_s, next(self._arrivals), length, adapters=adapters)
        self._requests[spec.request_id] = request
        self._queues.setdefault(kind, ClassQueue(kind)).add(request)

    def remove(self, request_id: str) -> None:
        """Take a request out, in whatever state: the next tick removes a joined one from the ranks, and an unknown id does nothing."""
        request = self._requests.get(request_id)
        if request is not None:
            if request.joined:
                self._leaving.append(request_id)
            self._forget(request)

    def requeue_running(self) -> list[str]:
        """Queue all requests of lost ranks again, at their former places; return their ids, oldest first."""
        running = [request for request in self._requests.values() if request.joined]
        for request in running:
            request.restart()
            self._queues[request.kind].joined = 0
        self._slots.clear()
        self._residents.clear()
        self._sent.clear()
        self._leaving.clear()
        return [request.spec.request_id for request in running]

    def replay_whole(self, request_id: str) -> RequestSpec:
        """Queue a request again that the ranks ended because it needs the model alone; return its new spec.

        All waiting requests of its task get to run alone too, as their pipeline is the same.
        """
        task = self._requests[request_id].spec.task
        for request in list(self._requests.values()):
            own = request.spec.request_id == request_id
            if own or (request.spec.task == task and not request.joined and not request.spec.whole):
                self._add_again(request, msgspec.structs.replace(request.spec, whole=True), alone=request.alone)
        return self._requests[request_id].spec

    def run_alone(self, request_id: str) -> None:
        """Queue a request again, to run before all that wait and while no other request is with the ranks."""
        request = self._requests[request_id]
        self._add_again(request, request.spec, alone=True)

    def observe(self, done: TickDone, now_s: float) -> list[str]:
        """Take the report of the oldest tick without one: learn its costs, and forget the requests that ended.

        Returns the requests that ran out of memory beside others. They are not over: each runs once more, alone.
        """
        sent = self._sent.popleft()
        for request in sent.requests:
            request.reported += 1
        again = []
        for progress in done.progress:
            if (held := self._requests.get(progress.request_id)) is not None:
                self._residents.measured(held, progress.held_bytes)
        finished = {outcome.request_id for outcome in done.finished}
        failed = {outcome.request_id: outcome.error.code for outcome in done.failed}
        self._learn_costs(sent, done, finished | failed.keys() | {replay.request_id for replay in done.replays})
        for request in sent.requests:
            request_id = request.spec.request_id
            if request_id in finished:
                self._learn_length(request)
                self.memory.succeeded(request.kind.load)
            # The request may have been removed meanwhile, and its id may stand for a later one.
            here = self._requests.get(request_id) is request
            if failed.get(request_id) == ErrorCode.INSUFFICIENT_MEMORY:
                if sent.beside == 0 and len(sent.requests) == 1:
                    self.memory.failed(request.kind.load, now_s)
                elif here:
                    self.run_alone(request_id)
                    again.append(request_id)
                    continue
            if here and (request_id in finished or request_id in failed):
                self._forget(request)
        return again

    def next_tick(self, now_s: float) -> Tick | None:
        """Return the next tick, with a step of one class and the requests that leave; None if no request can step and none leaves.

        The tick counts as sent from now on.
        """
        self._reserve_slots(now_s)
        chosen = self._choose(now_s)
        if not chosen:
            return self.leave_tick()
        leave, self._leaving = self._leaving, []
        number = next(self._tick_numbers)
        join = [request for request in chosen if not request.joined]
        denoising = sum(not self._is_last(request) for request in chosen)
        for request in join:
            request.joined = True
            self._slots.join(request)
            self._residents.join(request)
            self._queues[request.kind].joined += 1
        for request in chosen:
            request.sent += 1
        beside, beside_bytes = self._residents.beside(chosen)
        self._sent.append(SentTick(number, chosen[0].kind, chosen, denoising, beside, beside_bytes))
        return Tick(number, [request.spec for request in join], leave, [request.spec.request_id for request in chosen])

    def leave_tick(self) -> Tick | None:
        """Return a tick that only removes leaving requests from the ranks; None without any. It counts as sent from now on."""
        if not self._leaving:
            return None
        leave, self._leaving = self._leaving, []
        number = next(self._tick_numbers)
        self._sent.append(SentTick(number, None, [], 0))
        return Tick(number, [], leave, [])

    def held_until_s(self) -> float | None:
        """Return the earliest time at which a class that has not started stops waiting for company; it may be past.

        None if all classes have started, or there is no window.
        """
        held = [queue.oldest.arrived_s + self._window_s for queue in self._queues.values() if not queue.started]
        return min(held, default=None) if self._window_s else None

    def oldest_wave(self) -> TickEstimate:
        """Return an estimate of the ranks' current work, the oldest tick without a report; there must be one."""
        sent = self._sent[0]
        if sent.kind is None:
            return TickEstimate("the removal of requests", steps=1, step_s=0.0, same_class=True)
        longest = max(sent.requests, key=lambda request: request.length)
        step, steps, count = longest.reported + 1, longest.length, len(sent.requests)
        return TickEstimate(
            f"step {step} of {steps} of {count} requests for images of {sent.kind}",
            steps=longest.length,
            step_s=self._costs.careful_step_s(sent.kind, len(sent.requests)),
            same_class=self._costs.has_measured(sent.kind),
            once_s=self._costs.once_s(sent.kind),
        )

    def expected_s(self, spec: RequestSpec) -> float:
        """Return the device seconds that a request is expected to take in company, before it is queued."""
        return self._share_s(class_of(spec, self._defaults)) * self._lengths.of(self._course(spec))

    def left_s(self, request_id: str) -> float:
        """Return the device seconds that a queued request still takes; 0 for an unknown one."""
        request = self._requests.get(request_id)
        return self._share_s(request.kind) * request.left if request is not None else 0.0

    # --- choice ---------------------------------------------------------------------------------------------------------

    def _choose(self, now_s: float) -> list[QueuedRequest]:
        """Choose the requests of the next step, and credit the classes that have waited too long for it."""
        if (lone := next(iter(self._alone.values()), None)) is not None and (lone.joined or self._nobody_is_there()):
            return [lone] if lone.left else []
        batches = [(queue, batch) for queue in self._queues.values() if (batch := self._batch(queue, now_s))]
        if not batches:
            return []
        overdue = [(queue, batch) for queue, batch in batches if self._is_overdue(queue, now_s)]
        patient = self._queues.keys() - {queue.kind for queue, _ in overdue}
        for kind in patient:
            self._queues[kind].credit_s = 0.0
        owed = [(queue, batch) for queue, batch in overdue if queue.credit_s >= self._cost_s(batch)]
        if owed:
            queue, batch = max(owed, key=lambda pair: pair[0].credit_s)
            queue.credit_s -= self._cost_s(batch)
            return batch
        queue, batch = min(batches, key=lambda pair: (self._seconds_to_an_image(pair[1]), pair[0].oldest.number))
        spent_s = self._cost_s(batch)
        # The overdue classes that are not chosen are credited with their guaranteed share of this time.
        for other, _ in overdue:
            if other is not queue:
                other.credit_s += spent_s * SHARE / (1 - SHARE) / len(overdue)
        return batch

    def _nobody_is_there(self) -> bool:
        """Return whether the ranks hold no request; only their reports show it."""
        return self._residents.count == 0 and not self._sent

    def _batch(self, queue: ClassQueue, now_s: float) -> list[QueuedRequest]:
        """Choose a class's requests for a step at `now_s` by age; none if all are on their way or the class still waits for company.

        A last tick, which only decodes, takes no place. No request joins while another waits to run alone.
        """
        demand = queue.demand(self._max_batch_size)
        size = self._size(queue.kind, demand)
        if demand == 0 or self._waits_for_company(queue, demand, now_s):
            return []
        # While a request waits for its run alone, the others run to their end and none joins.
        room = 0 if self._alone else self._residents.room(queue.kind, self.memory.free_bytes)
        return self._filled(queue, size, min(size, room))

    def _filled(self, queue: ClassQueue, size: int, joins: int) -> list[QueuedRequest]:
        """Pick the requests that only have to be decoded, and up to `size` others, of which at most `joins` are new to the ranks.

        New ones whose adapters have no slots are passed over and noted in `_passed`.
        """
        batch: list[QueuedRequest] = []
        joining: set[int] = set()
        here, passed = queue.joined, 0
        for request in queue.requests.values():
            if not here and (size == 0 or joins == 0 or passed >= LOOKAHEAD):
                break
            here -= request.joined
            if request.left and self._is_last(request):
                batch.append(request)
            elif request.left and size and (request.joined or joins):
                if not request.joined and not self._slots.fits(request, joining):
                    self._passed.append(request)
                    passed += 1
                    continue
                batch.append(request)
                size -= 1
                if not request.joined:
                    joins -= 1
                    joining |= request.adapters
        return batch

    def _size(self, kind: RequestClass, demand: int) -> int:
        """Choose a batch size for a class by its costs, no larger than memory and demand allow; exact requests run one by one."""
        if demand == 0 or kind.exact:
            return min(demand, 1)
        return self._costs.batch(kind, self.memory.batch(kind, demand, beside_bytes=self._residents.bytes_beside(kind)))

    def _waits_for_company(self, queue: ClassQueue, demand: int, now_s: float) -> bool:
        """Return whether a class waits for company: it has not started, and more of its requests would make the step cheaper."""
        if not self._window_s or queue.started or now_s >= queue.oldest.arrived_s + self._window_s:
            return False
        return demand < self._size(queue.kind, self._max_batch_size)

    def _is_last(self, request: QueuedRequest) -> bool:
        """Return True if a running request has only its decoding tick left, by the length that all others of its parameters had."""
        return request.sent > 0 and request.left == 1 and self._lengths.sure(self._course(request.spec))

    def _is_overdue(self, queue: ClassQueue, now_s: float) -> bool:
        return self._has_waited_too_long(queue.oldest, now_s)

    def _reserve_slots(self, now_s: float) -> None:
        """Reserve slots for the oldest request that was passed for too long."""
        here = (request for request in self._passed if self._requests.get(request.spec.request_id) is request)
        self._slots.reserve(request for request in here if self._has_waited_too_long(request, now_s))
        self._passed = []

    def _has_waited_too_long(self, request: QueuedRequest, now_s: float) -> bool:
        return now_s - request.arrived_s > PATIENCE * request.length * self._costs.step_s(request.kind, 1)

    def _seconds_to_an_image(self, batch: list[QueuedRequest]) -> float:
        """Return the least device seconds for an image, over all ticks at which this batch could end."""
        step_s = self._cost_s(batch)
        left = sorted(request.left for request in batch)
        return min(ticks * step_s / (position + 1) for position, ticks in enumerate(left))

    # --- estimates --------------------------------------------------------------------------------------------------------

    def _cost_s(self, batch: list[QueuedRequest]) -> float:
        """Estimate the seconds of a step of these requests; 0 if all only have to be decoded, so that they go first."""
        denoising = sum(not self._is_last(request) for request in batch)
        return self._costs.step_s(batch[0].kind, denoising) if denoising else 0.0

    def _share_s(self, kind: RequestClass) -> float:
        """Return the seconds of one request's share in a step, at the batch size that its class has when many wait."""
        batch = max(1, self._size(kind, self._max_batch_size))
        return self._costs.step_s(kind, batch) / batch

    def _course(self, spec: RequestSpec) -> RunLengthKey:
        return RunLengthKey(spec.steps or self._defaults.steps, spec.task, spec.strength)

    def _learn_costs(self, sent: SentTick, done: TickDone, ended: set[str]) -> None:
        """Learn from a tick's report how much memory and how many seconds a step takes.

        Requests in `ended` finished or failed in this tick, or are made again. They do not count among those that share the step's time.
        """
        if sent.kind is None:
            return
        self.memory.observe(sent.kind, len(sent.requests), done.peak_bytes - sent.beside_bytes)
        batch = sum(request.spec.request_id not in ended for request in sent.requests)
        # A tick without a model call only copied adapters, which says nothing about a step.
        if batch and done.calls:
            self._costs.observe(sent.kind, batch, sent.denoising, done)

    def _learn_length(self, request: QueuedRequest) -> None:
        course = self._course(request.spec)
        expected = self._lengths.of(course)
        self._lengths.observe(course, request.reported)
        if (length := self._lengths.of(course)) != expected:
            for other in self._requests.values():
                if self._course(other.spec) == course:
                    other.length = length

    def _add_again(self, request: QueuedRequest, spec: RequestSpec, *, alone: bool) -> None:
        """Replace a request that the ranks do not have by one that begins, which keeps its number."""
        self._forget(request)
        self.add(spec, request.arrived_s)
        again = self._requests[spec.request_id]
        again.number = request.number
        if alone:
            again.alone = True
            self._alone[spec.request_id] = again

    def _forget(self, request: QueuedRequest) -> None:
        request_id = request.spec.request_id
        del self._requests[request_id]
        self._alone.pop(request_id, None)
        self._residents.leave(request)
        self._slots.leave(request)
        queue = self._queues[request.kind]
        queue.joined -= request.joined
        del queue.requests[request_id]
        if not queue.requests:
            del self._queues[request.kind]
