# SPDX-License-Identifier: Apache-2.0
"""The requests of one class in order of arrival, and the progress of each. Pure."""

import itertools
import math

import msgspec

from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.messages import RequestSpec, Task
from diffusion_worker.recent import Recent

# Steps assumed until a pipeline has shown its default.
USUAL_STEPS = 50
# Run lengths that are remembered. Clients choose strengths freely, so their combinations are without bound.
REMEMBERED_COURSES = 1024


class RunLengthKey(msgspec.Struct, frozen=True):
    """Properties of a request that decide its number of ticks; an edit of little strength skips most of its steps."""

    steps: int | None
    task: Task = Task.GENERATE
    strength: float | None = None


class RunLengths:
    """Ticks of requests by their parameters: one more than steps at first, then as observed.

    Some schedulers call the model twice a step, some pipelines leave steps out, and only the pipeline knows its defaults.
    """

    def __init__(self) -> None:
        # The most ticks, and whether all requests took as many.
        self._seen: Recent[RunLengthKey, tuple[int, bool]] = Recent(REMEMBERED_COURSES)

    def of(self, course: RunLengthKey) -> int:
        """Estimate the ticks of a request: the most observed for its key, otherwise by its steps and strength, and one for the decode."""
        if course in self._seen:
            return self._seen[course][0]
        steps = course.steps or USUAL_STEPS
        return (steps if course.strength is None else math.ceil(steps * course.strength)) + 1

    def sure(self, course: RunLengthKey) -> bool:
        """Return whether every request of this key that was observed took the same number of ticks; False if none was."""
        return course in self._seen and self._seen[course][1]

    def observe(self, course: RunLengthKey, ticks: int) -> None:
        """Learn from a finished request; a key whose requests differ is not sure any more, and keeps the largest number."""
        most, sure = self._seen.get(course, (ticks, True))
        self._seen[course] = max(ticks, most), sure and ticks == most


class QueuedRequest(msgspec.Struct, eq=False):
    """A request from its arrival to its outcome. `sent` counts the ticks it was put into, `reported` those that came back."""

    spec: RequestSpec
    kind: RequestClass
    arrived_s: float
    number: int
    length: int
    joined: bool = False
    sent: int = 0
    reported: int = 0
    # Ids of the adapters that it needs in slots.
    adapters: frozenset[int] = frozenset()
    # It runs while no other request is with the ranks.
    alone: bool = False
    # Estimate of its memory on each rank between two steps; 0 until it has joined.
    held_bytes: int = 0

    @property
    def left(self) -> int:
        """Return how many ticks the request must still be sent in, by its expected length.

        Past that length it is 0 while a sent tick has not come back, and 1 once all have.
        """
        return max(self.length - self.sent, 0 if self.sent > self.reported else 1)

    def restart(self) -> None:
        """Reset its progress: not joined, no ticks sent or reported, no memory held. Spec, length and arrival stay."""
        self.joined, self.sent, self.reported, self.held_bytes = False, 0, 0, 0


class ClassQueue:
    """The requests of one class in the order they came, with the device time it is owed."""

    def __init__(self, kind: RequestClass) -> None:
        self.kind = kind
        self.requests: dict[str, QueuedRequest] = {}
        self.credit_s = 0.0
        # Requests with the ranks; some may have passed others that wait for slots.
        self.joined = 0

    @property
    def oldest(self) -> QueuedRequest:
        """The first request of the queue, which must not be empty."""
        return next(iter(self.requests.values()))

    @property
    def started(self) -> bool:
        """Return whether a request of this class has joined the ranks and not left them."""
        return self.joined > 0

    def add(self, request: QueuedRequest) -> None:
        """Queue a request behind the others; if its id is queued already, it takes that place."""
        self.requests[request.spec.request_id] = request

    def demand(self, most: int) -> int:
        """Count the requests with steps left; stop counting at `most`, as a batch takes no more."""
        return sum(1 for _ in itertools.islice((1 for request in self.requests.values() if request.left), most))
