# SPDX-License-Identifier: Apache-2.0
"""Times at which actions that failed are tried again. A wake of their object does not shorten them; an edit of its spec ends them."""

from datetime import datetime, timedelta

import msgspec

from diffusion_operator.errors import ClusterError, ClusterRefused
from diffusion_operator.pauses import Backoff

FAILED = Backoff(first_s=1, longest_s=300)
REFUSED = Backoff(first_s=1, longest_s=60)
"""For a quota or a policy, which somebody may change at any time."""
FORGET_AFTER = timedelta(minutes=10)


class Wait(msgspec.Struct, frozen=True):
    failures: int
    until: datetime
    error: str


class Backoffs:
    """Failed actions of one object, by a name for each."""

    def __init__(self) -> None:
        self._generation = 0
        self._waits: dict[str, Wait] = {}

    def see(self, generation: int) -> None:
        """Forget all failures after an edit of the spec, because the edit may have mended their reason."""
        if generation != self._generation:
            self._generation = generation
            self._waits.clear()

    def waiting(self, action: str, now: datetime) -> str:
        """Return the error after which the action waits. Empty where it is due."""
        wait = self._waits.get(action)
        return wait.error if wait is not None and now < wait.until else ""

    def failed(self, action: str, error: Exception, now: datetime) -> None:
        """Note a failure of an action, which then waits for 1, 2, 4 … seconds, up to five minutes.

        After a refusal it waits a minute at most. A longer Retry-After of the API server counts.
        """
        before = self._waits.get(action)
        failures = before.failures + 1 if before is not None else 1
        backoff = REFUSED if isinstance(error, ClusterRefused) else FAILED
        asked_s = error.retry_after_s if isinstance(error, ClusterError) else 0
        pause = timedelta(seconds=max(asked_s, backoff.after_s(failures)))
        self._waits = {name: wait for name, wait in self._waits.items() if now - wait.until < FORGET_AFTER}
        self._waits[action] = Wait(failures=failures, until=now + pause, error=str(error) or type(error).__name__)

    def succeeded(self, action: str) -> None:
        self._waits.pop(action, None)

    def next_s(self, now: datetime) -> float | None:
        """Return the seconds until the next action is due. None where none waits."""
        return min(((wait.until - now).total_seconds() for wait in self._waits.values() if wait.until > now), default=None)
