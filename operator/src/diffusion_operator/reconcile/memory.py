# SPDX-License-Identifier: Apache-2.0
"""What the process remembers of a deployment between passes. Losing it costs repeated, idempotent work, never correctness."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.plan.adapters.plan import AdapterView
from diffusion_operator.plan.adapters.publishing import worth_publishing
from diffusion_operator.plan.observed.children import ChildState, ChildTry, Repairs
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Departures, Poll, TemplateTrial
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.control_tokens import ControlTokens


@dataclass
class PollRecord:
    """Polls of one container's life: a restart begins a new record."""

    restarts: int
    state: WorkerState | None = None
    failures: int = 0
    failing_since: datetime | None = None
    error: str = ""

    def succeeded(self, state: WorkerState) -> None:
        self.state, self.failures, self.failing_since, self.error = state, 0, None, ""

    def failed(self, error: str, now: datetime) -> None:
        self.failures += 1
        self.failing_since = self.failing_since or now
        self.error = error

    def poll(self, now: datetime) -> Poll:
        failing_for = now - (self.failing_since or now)
        return Poll(state=self.state, failures=self.failures, failing_for=failing_for, error=self.error)


@dataclass
class Applied:
    content: object
    at: datetime


class KnownPod(msgspec.Struct, frozen=True):
    name: str
    revision: str


class SleepSnapshot(msgspec.Struct, frozen=True):
    """Reports of sleeping replicas in a pass that found nothing to do; see sleep_snapshot.py."""

    until: datetime
    """Then a whole pass is due."""
    said: Mapping[str, WorkerState]
    """By IP."""


@dataclass
class DeploymentMemory:
    """One deployment, by UID: another one of the same name starts from nothing."""

    uid: str
    tokens: ControlTokens
    polls: dict[str, PollRecord] = field(default_factory=dict)
    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    operation_not_before: dict[str, datetime] = field(default_factory=dict)
    applied: dict[str, Applied] = field(default_factory=dict)
    """By kind; the content is None where there must be none."""
    repairs: dict[str, Repairs] = field(default_factory=dict)
    """Those of each child, by its kind."""
    doubted: set[str] = field(default_factory=set)
    """Kinds of children that were touched since the last pass."""
    pods: dict[str, KnownPod] = field(default_factory=dict)
    """By UID, those that were there and not on their way out at the last look."""
    missed_pods: dict[str, KnownPod] = field(default_factory=dict)
    """By UID, those that were and that this process did not delete, until it is told of them."""
    deleted_pods: set[str] = field(default_factory=set)
    """UIDs of those that this process deleted."""
    routed: dict[str, bool] = field(default_factory=dict)
    """By pod UID: what this process last wrote to the routable label."""
    generation: int = 0
    """The object's, at the last pass: another one makes every failed child due at once, because the edit may have mended it."""
    tries: dict[str, ChildTry] = field(default_factory=dict)
    """Children that are not as the spec asks, by kind."""
    children: tuple[ChildState, ...] = ()
    """After the last pass."""
    taken: dict[int, int] = field(default_factory=dict)
    """The highest incarnation whose pod name somebody else has, by index."""
    failures: list[Exception] = field(default_factory=list)
    """Errors in this pass: it goes on without what failed, and raises the first at its end."""
    unrouted_at: dict[str, datetime] = field(default_factory=dict)
    trial: TemplateTrial | None = None
    """The last dry run of a template."""
    refusal: str = ""
    backoffs: Backoffs = field(default_factory=Backoffs)
    status_written_at: datetime | None = None
    departures: Departures = field(default_factory=Departures)
    snapshot: SleepSnapshot | None = None
    views: dict[str, AdapterView] = field(default_factory=dict)
    """By UID of the adapter, as they were published last."""
    published_at: dict[str, datetime] = field(default_factory=dict)

    def forget_pods(self, present: set[str]) -> None:
        self.polls = {uid: record for uid, record in self.polls.items() if uid in present}
        self.unrouted_at = {uid: when for uid, when in self.unrouted_at.items() if uid in present}
        self.routed = {uid: routable for uid, routable in self.routed.items() if uid in present}
        self.deleted_pods &= present
        self.operation_not_before = {key: when for key, when in self.operation_not_before.items() if key.partition("/")[0] in present}

    def publish(self, views: tuple[AdapterView, ...], now: datetime) -> tuple[AdapterView, ...]:
        """Keep what is worth a look at its object's status, and return that."""
        present = {view.decision.adapter.metadata.uid: view for view in views}
        self.views = {uid: view for uid, view in self.views.items() if uid in present}
        self.published_at = {uid: when for uid, when in self.published_at.items() if uid in present}
        worth = {
            uid: view
            for uid, view in present.items()
            if worth_publishing(self.views.get(uid), view, since=now - self.published_at.get(uid, now))
        }
        self.views |= worth
        self.published_at |= dict.fromkeys(worth, now)
        return tuple(worth.values())

    def recall_attempts(self, adapters: tuple[LoRAAdapter, ...], now: datetime) -> None:
        """Backoff is persisted in the adapters' status; what this process did itself is newer. What is about no living boot goes."""
        for adapter in adapters:
            for key, attempt in _persisted(adapter, now):
                self.attempts.setdefault(key, attempt)
        living = {(one.metadata.uid, one.metadata.generation) for one in adapters}
        boots = {record.state.boot_id for record in self.polls.values() if record.state is not None}
        self.attempts = {
            key: attempt for key, attempt in self.attempts.items() if (key.adapter_uid, key.generation) in living and key.boot_id in boots
        }


def _persisted(adapter: LoRAAdapter, now: datetime) -> list[tuple[AttemptKey, Attempt]]:
    metadata = adapter.metadata
    if adapter.status.observed_generation != metadata.generation:
        return []
    return [
        (
            AttemptKey(adapter_uid=metadata.uid, generation=metadata.generation, boot_id=one.boot_id),
            Attempt(
                count=one.attempts,
                next_retry=one.next_retry_time or now,
                error=WireError(
                    code=one.last_error.code or "", message=one.last_error.message or "", retryable=bool(one.last_error.retryable)
                ),
            ),
        )
        for one in adapter.status.replica_instances
        if one.boot_id is not None and one.attempts is not None and one.last_error is not None
    ]
