# SPDX-License-Identifier: Apache-2.0
"""The requests on the ranks, and the memory that each holds there between two steps. Pure.

A paused request keeps its latents, its embeddings and the values of its step cache. The ranks report these bytes with each step, so they
are learned by class. Joins are bounded by the sum, since the rest of the memory is for the step itself.
"""

from collections import Counter
from collections.abc import Iterable

from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.engine.scheduling.request_queue import QueuedRequest
from diffusion_worker.recent import Recent

# The share of the memory beside the weights that requests may hold between steps.
HELD_SHARE = 0.5
# Bytes of a request by its load, until one was reported: embeddings count most.
GUESSED_BYTES_PER_PIXEL = 16.0
# The part of another size's bytes that a smaller one holds at least, as its prompt is as long.
LEAST_PART = 0.25
# Requests on the ranks at once, in batches, where the memory is not known.
RESIDENT_BATCHES = 4
# Classes whose bytes are remembered.
REMEMBERED = 256


class Residents:
    """The requests on the ranks: their number, and the bytes that they hold by estimate."""

    def __init__(self, max_batch_size: int) -> None:
        self.count = 0
        self.bytes = 0
        self._max_batch_size = max_batch_size
        self._by_class: Counter[RequestClass] = Counter()
        # The most bytes reported for a request, by its class.
        self._known: Recent[RequestClass, int] = Recent(REMEMBERED)

    def join(self, request: QueuedRequest) -> None:
        """Add a request, with the bytes that its class is known or guessed to hold."""
        self.count += 1
        self._set(request, self.estimate(request.kind))

    def leave(self, request: QueuedRequest) -> None:
        """Remove a request; harmless if it never joined."""
        self.count -= request.joined
        self._set(request, 0)

    def clear(self) -> None:
        """Remove all requests, because their ranks are lost; each is counted again when it joins."""
        self.count = self.bytes = 0
        self._by_class.clear()

    def measured(self, request: QueuedRequest, held_bytes: int) -> None:
        """Take the ranks' report of the bytes that a request holds after a step; 0 is no report."""
        if held_bytes <= 0:
            return
        kind = request.kind
        self._known[kind] = max(held_bytes, self._known.get(kind, 0))
        if request.joined:
            self._set(request, held_bytes)

    def estimate(self, kind: RequestClass) -> int:
        """Return the bytes that a request of a class may hold between two steps: the most reported for the class.

        Without a report they are scaled from the class with the nearest load, or guessed from the pixels if nothing was reported.
        """
        if kind in self._known:
            return self._known[kind]
        if not self._known:
            return round(kind.load * GUESSED_BYTES_PER_PIXEL)
        nearest = min(self._known, key=lambda known: (known.accelerated is not kind.accelerated, abs(known.load - kind.load)))
        return round(self._known[nearest] * max(LEAST_PART, kind.load / nearest.load))

    def room(self, kind: RequestClass, free_bytes: int) -> int:
        """Return how many more requests of a class may join by the memory that requests hold; at least 1 if none is on the ranks.

        If the free memory is unknown (0), their number is limited to a few batches instead, and the result may be 0 or less.
        """
        if not free_bytes:
            return RESIDENT_BATCHES * self._max_batch_size - self.count
        fitting = int((free_bytes * HELD_SHARE - self.bytes) // max(1, self.estimate(kind)))
        return max(fitting, 0 if self.count else 1)

    def bytes_beside(self, kind: RequestClass) -> int:
        """Return the bytes that requests of other classes hold."""
        return self.bytes - self._by_class[kind]

    def beside(self, requests: Iterable[QueuedRequest]) -> tuple[int, int]:
        """Return how many requests on the ranks are not among these, and the bytes that they hold. All of these must have joined."""
        chosen = list(requests)
        return self.count - len(chosen), self.bytes - sum(request.held_bytes for request in chosen)

    def _set(self, request: QueuedRequest, held_bytes: int) -> None:
        more = held_bytes - request.held_bytes
        request.held_bytes = held_bytes
        self.bytes += more
        self._by_class[request.kind] += more
        if not self._by_class[request.kind]:
            del self._by_class[request.kind]
