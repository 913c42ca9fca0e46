# SPDX-License-Identifier: Apache-2.0
"""Admission by adapters: those of all requests on the ranks together must fit in the slots. Pure.

A request whose adapters do not fit is passed by others that need no slot more. A request that waited too long reserves slots. From then on
younger ones join only if their adapters leave it enough, so that it joins once others are done.
"""

from collections import Counter
from collections.abc import Iterable

from diffusion_worker.engine.scheduling.request_queue import QueuedRequest


class AdapterSlots:
    """The slots of one rank group, counted in adapters of the requests that are with the ranks."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._users = Counter[int]()
        self._reserved: QueuedRequest | None = None

    @property
    def active(self) -> int:
        """Adapters of the requests that are with the ranks."""
        return len(self._users)

    def join(self, request: QueuedRequest) -> None:
        """A request takes its slots."""
        self._users.update(request.adapters)
        if request is self._reserved:
            self._reserved = None

    def leave(self, request: QueuedRequest) -> None:
        """A request that joined gives its slots back, one that waited its reservation."""
        if request is self._reserved:
            self._reserved = None
        if request.joined:
            self._users.subtract(request.adapters)
            self._users = +self._users

    def clear(self) -> None:
        """No request is with the ranks any more."""
        self._users.clear()

    def reserve(self, waiting: Iterable[QueuedRequest]) -> None:
        """The oldest of these is to have its slots next, unless another one is already."""
        if self._reserved is None:
            self._reserved = min(waiting, key=lambda request: request.number, default=None)

    def fits(self, request: QueuedRequest, joining: set[int]) -> bool:
        """Return whether a request fits beside the running ones and adapters that are `joining` in the same tick."""
        if not request.adapters:
            return True
        taken = self._users.keys() | joining
        if len(taken | request.adapters) > self._slots:
            return False
        first = self._reserved
        return first is None or request.number <= first.number or request.adapters <= self._kept(first)

    def _kept(self, first: QueuedRequest) -> frozenset[int]:
        """Adapters that may go on being joined while one request waits: its own, and others as far as they leave it its slots."""
        others = sorted(self._users.keys() - first.adapters)
        return first.adapters | set(others[: self._slots - len(first.adapters)])
