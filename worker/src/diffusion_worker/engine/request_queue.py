# SPDX-License-Identifier: Apache-2.0
"""The requests of one class in the order they came, and how far each of them is. Pure."""

import itertools

import msgspec

from diffusion_worker.engine.request_class import RequestClass
from diffusion_worker.messages import RequestSpec

# Until a pipeline has shown how many steps it takes by itself.
USUAL_STEPS = 50


class RunLengths:
    """How many ticks requests take by the steps they ask for. At first one more than steps; then as it was seen.

    Some schedulers call the model twice a step, some pipelines leave steps out, and only the pipeline knows its default.
    """

    def __init__(self) -> None:
        self._seen: dict[int | None, int] = {}
        self._varying: set[int | None] = set()

    def of(self, steps: int | None) -> int:
        """Ticks that a request of so many steps takes, decode included."""
        return self._seen.get(steps, (steps or USUAL_STEPS) + 1)

    def sure(self, steps: int | None) -> bool:
        """Whether that is known: seen, and the same each time."""
        return steps in self._seen and steps not in self._varying

    def observe(self, steps: int | None, ticks: int) -> None:
        """A request of so many steps took so many ticks."""
        if self._seen.get(steps, ticks) != ticks:
            self._varying.add(steps)
        self._seen[steps] = max(ticks, self._seen.get(steps, 0))


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

    @property
    def left(self) -> int:
        """Ticks it still has to be put into; one that took longer than expected gets one more at a time."""
        return max(self.length - self.sent, 0 if self.sent > self.reported else 1)

    def restart(self) -> None:
        """Back to where it was when it came."""
        self.joined, self.sent, self.reported = False, 0, 0


class ClassQueue:
    """The requests of one class, first come first served, with the device time it is owed."""

    def __init__(self, kind: RequestClass) -> None:
        self.kind = kind
        self.requests: dict[str, QueuedRequest] = {}
        self.credit_s = 0.0

    @property
    def oldest(self) -> QueuedRequest:
        """The request that came first of those still here."""
        return next(iter(self.requests.values()))

    @property
    def started(self) -> bool:
        """Whether any of them is with the ranks; those come first in the queue, as it is served in order."""
        return self.oldest.joined

    def add(self, request: QueuedRequest) -> None:
        """Queue a request behind the others, or a replayed one where it was."""
        self.requests[request.spec.request_id] = request

    def demand(self, most: int) -> int:
        """Requests that could take a step now, counted up to `most`."""
        return sum(1 for _ in itertools.islice((1 for request in self.requests.values() if request.left), most))
