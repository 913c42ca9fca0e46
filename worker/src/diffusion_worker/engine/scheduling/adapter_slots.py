# SPDX-License-Identifier: Apache-2.0
"""Admission by adapter slots: the adapters of all requests on the ranks must fit in them together. Pure.

Requests that need no further slot pass a request whose adapters do not fit. A request that waited too long reserves slots. From then on
younger requests join only if their adapters leave enough slots for it, so it joins once others are done.
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
        """Count the adapters of a request as in use, without a check that they fit; its reservation, if it had one, is used up."""
        self._users.update(request.adapters)
        if request is self._reserved:
            self._reserved = None

    def leave(self, request: QueuedRequest) -> None:
        """Release the slots of a request that joined, and the reservation of a waiting one."""
        if request is self._reserved:
            self._reserved = None
        if request.joined:
            self._users.subtract(request.adapters)
            self._users = +self._users

    def clear(self) -> None:
        """Free the slots of all requests because their ranks are lost; a reservation for a waiting one stays."""
        self._users.clear()

    def reserve(self, waiting: Iterable[QueuedRequest]) -> None:
        """Reserve slots for the oldest of these requests, unless another one has a reservation."""
        if self._reserved is None:
            self._reserved = min(waiting, key=lambda request: request.number, default=None)

    def fits(self, request: QueuedRequest, joining: set[int]) -> bool:
        """Return whether a request's adapters fit in the slots beside those in use and those `joining` in the same tick.

        A request younger than the one with a reservation must also leave enough slots for that one. True without adapters.
        """
        if not request.adapters:
            return True
        taken = self._users.keys() | joining
        if len(taken | request.adapters) > self._slots:
            return False
        first = self._reserved
        return first is None or request.number <= first.number or request.adapters <= self._kept(first)

    def _kept(self, first: QueuedRequest) -> frozenset[int]:
        """Return the adapters that requests may join with while `first` waits: its own, and others as far as they leave its slots free."""
        others = sorted(self._users.keys() - first.adapters)
        return first.adapters | set(others[: self._slots - len(first.adapters)])
