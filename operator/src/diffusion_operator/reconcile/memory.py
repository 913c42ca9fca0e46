# SPDX-License-Identifier: Apache-2.0
"""State that the process keeps of a deployment between passes. Losing it costs repeated, idempotent work, never correctness."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.plan.adapters.mounted_file import AdapterFile
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.adapters.publishing import Worth, worth_publishing
from diffusion_operator.plan.adapters.slices import SLICE, Slices
from diffusion_operator.plan.adapters.view import AdapterView
from diffusion_operator.plan.observed.children import ChildState, ChildTry, Repairs
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Departures, Poll, TemplateCheck, TemplateTrial
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.reconcile.store.parsed_adapters import ParsedAdapters


class Followed(StrEnum):
    """The way in which the operator hears of a worker's changes."""

    WATCHED = "watched"
    LOST = "lost"
    UNHEARD = "unheard"
    """It has not answered yet."""


NONE: frozenset[str] = frozenset()
"""The one empty set of all deployments: each other empty set takes 216 bytes."""
UNPUBLISHED_S = 5.0
"""Until counts of adapters are looked at again for their statuses."""


class WrittenFile(NamedTuple):
    file: AdapterFile
    at: datetime


@dataclass(slots=True)
class PollRecord:
    """Answers of a worker in one life of its container at one address: another life begins a new record."""

    life: tuple[str, int]
    """Address and restarts."""
    since: datetime
    """When the record began."""
    state: WorkerState | None = None
    received_at: datetime | None = None
    failures: int = 0
    failing_since: datetime | None = None
    error: str = ""
    reported_lost: bool = False
    """The deployment was woken because the worker is unreachable."""

    @property
    def revision(self) -> str:
        """The revision of the last answer; empty where there is nothing to wait for."""
        return self.state.revision if self.state is not None else ""

    @property
    def unheard(self) -> bool:
        """Return whether it has neither answered nor failed to."""
        return self.state is None and not self.failures

    def succeeded(self, state: WorkerState, now: datetime) -> bool:
        """Keep a worker's answer and return whether it is news: the first one, one after failures, or one of another revision."""
        before, was_failing = self.state, self.failures > 0
        self.state, self.received_at, self.failures, self.failing_since, self.error = state, now, 0, None, ""
        self.reported_lost = False
        return was_failing or before is None or state.revision != before.revision

    def failed(self, error: str, now: datetime) -> bool:
        """Count a failure to reach the worker, and return whether it is news: it had not been heard of, or now counts as unreachable.

        A loss alone asks for no pass.
        """
        unheard = self.unheard
        self.failures += 1
        self.failing_since = self.failing_since or now
        self.error = error
        became_unreachable = self.poll(now).unreachable and not self.reported_lost
        self.reported_lost = self.reported_lost or became_unreachable
        return unheard or became_unreachable

    @property
    def followed(self) -> Followed:
        if self.failures:
            return Followed.LOST
        return Followed.UNHEARD if self.state is None else Followed.WATCHED

    def poll(self, now: datetime) -> Poll:
        failing_for = now - (self.failing_since or now)
        since_s = max(0.0, (now - (self.received_at or now)).total_seconds())
        return Poll(state=self.state, since_s=since_s, failures=self.failures, failing_for=failing_for, error=self.error)


def life_of(pod: Pod) -> tuple[str, int]:
    """Return address and restarts: another worker process answers where one of them is another."""
    return pod.ip, pod.container.restarts


@dataclass(slots=True)
class Applied:
    content: object
    at: datetime


class KnownPod(msgspec.Struct, frozen=True):
    name: str
    revision: str


@dataclass(slots=True)
class DeploymentMemory:
    """State that the process keeps of one deployment. A new object of the same name, with another UID, starts from nothing."""

    uid: str
    tokens: ControlTokens
    polls: dict[str, PollRecord] = field(default_factory=dict)
    parsed: ParsedAdapters = field(default_factory=ParsedAdapters)
    adapters: AdapterPlan = field(default_factory=AdapterPlan)
    """The last plan of them."""
    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    """Those that calls since then came to."""
    operation_not_before: dict[str, datetime] = field(default_factory=dict)
    applied: dict[str, Applied] = field(default_factory=dict)
    """Hashes of children by kind and name; empty where there must be none."""
    repairs: dict[str, Repairs] = field(default_factory=dict)
    """Those of each child, by its kind and name."""
    doubted: frozenset[str] = NONE
    """Kinds and names of children that were touched since the last pass."""
    pods: dict[str, KnownPod] = field(default_factory=dict)
    """Pods that existed and were not terminating at the last look, by UID."""
    pods_known: bool = False
    """Set once this process has looked for the pods that an earlier one wrote into the status."""
    missed_pods: dict[str, KnownPod] = field(default_factory=dict)
    """Pods that disappeared without this process deleting them, by UID, until the loss is reported."""
    deleted_pods: frozenset[str] = NONE
    """UIDs of those that this process deleted."""
    routed: dict[str, bool] = field(default_factory=dict)
    """The routable label that this process last wrote, by pod UID."""
    generation: int = 0
    """The object's, at the last pass: another one makes every failed child due at once, because the edit may have mended it."""
    tries: dict[str, ChildTry] = field(default_factory=dict)
    """Children that are not as the spec asks, by kind and name."""
    file: WrittenFile | None = None
    """The adapters' file as it was last rendered."""
    children: tuple[ChildState, ...] = ()
    """After the last pass."""
    taken: dict[int, int] = field(default_factory=dict)
    """The highest incarnation whose pod name somebody else has, by index."""
    failures: list[Exception] = field(default_factory=list)
    """Errors in this pass: it goes on without what failed, and reports the first at its end."""
    undrained: frozenset[str] = NONE
    """UIDs of pods whose worker did not take the call to drain: the end of the pod drains them."""
    unrouted_at: dict[str, datetime] = field(default_factory=dict)
    trial: TemplateTrial | None = None
    """The last dry run of a template."""
    check: TemplateCheck | None = None
    """The last check pod of a template."""
    warnings: dict[str, tuple[datetime, str]] = field(default_factory=dict)
    """When the Events of a pod that waits were read, and the last Warning among them, by UID."""
    refusal: str = ""
    backoffs: Backoffs = field(default_factory=Backoffs)
    status_written_at: datetime | None = None
    version: str = ""
    """The object's, in this pass: a status is written only over the one that it was computed from."""
    departures: Departures = field(default_factory=Departures)
    withheld_s: float | None = None
    """Seconds until something is due that waits: counts for a status, or the adapters' file; None without any."""
    views: dict[str, AdapterView] = field(default_factory=dict)
    """The views that were last published, by UID of the adapter."""
    published_at: dict[str, datetime] = field(default_factory=dict)
    unpublished: dict[str, AdapterView] = field(default_factory=dict)
    """Views that changed since, by UID."""

    def record_of(self, pod: Pod, now: datetime) -> PollRecord:
        """Return the record of the pod's worker in this life of its container.

        A new one begins if there is none, or if the pod's address or restarts changed.
        """
        record, life = self.polls.get(pod.uid), life_of(pod)
        if record is None or record.life != life:
            record = self.polls[pod.uid] = PollRecord(life=life, since=now)
        return record

    def withhold(self, seconds: float) -> None:
        """Have the next pass within so many seconds, for what waits until then; the shortest of several calls holds."""
        self.withheld_s = seconds if self.withheld_s is None else min(self.withheld_s, seconds)

    def forget_pods(self, present: set[str]) -> None:
        self.polls = {uid: record for uid, record in self.polls.items() if uid in present}
        self.unrouted_at = {uid: when for uid, when in self.unrouted_at.items() if uid in present}
        self.routed = {uid: routable for uid, routable in self.routed.items() if uid in present}
        self.deleted_pods = self.deleted_pods & present or NONE
        self.undrained = self.undrained & present or NONE
        self.operation_not_before = {key: when for key, when in self.operation_not_before.items() if key.partition("/")[0] in present}

    def remember(self, plan: AdapterPlan, seen: Mapping[AttemptKey, Attempt]) -> None:
        """Keep the plan of adapters for the next pass. The attempts in `seen` are part of it and are dropped here."""
        if plan.rows is not self.adapters.rows and plan.rows.keys() != self.adapters.rows.keys():
            self.views = {uid: view for uid, view in self.views.items() if uid in plan.rows}
            self.published_at = {uid: when for uid, when in self.published_at.items() if uid in plan.rows}
            self.unpublished = {uid: view for uid, view in self.unpublished.items() if uid in plan.rows}
        self.unpublished |= {view.decision.adapter.metadata.uid: view for view in plan.changed}
        self.adapters = plan
        self.attempts = {key: attempt for key, attempt in self.attempts.items() if seen.get(key) is not attempt}

    def attempt(self, key: AttemptKey) -> Attempt | None:
        return self.attempts.get(key) or self.adapters.attempt(key)

    def publish(self, now: datetime) -> Slices[list[AdapterView]]:
        """Return the views that are worth a look at their object's status, and count them as published."""
        published: list[AdapterView] = []
        for number, (uid, view) in enumerate(tuple(self.unpublished.items())):
            worth = worth_publishing(self.views.get(uid), view, since=now - self.published_at.get(uid, now))
            if worth is Worth.NOW:
                self.views[uid], self.published_at[uid] = view, now
                published.append(view)
            if worth is not Worth.LATER:
                del self.unpublished[uid]
            if number % SLICE == SLICE - 1:
                yield
        if self.unpublished:
            self.withhold(UNPUBLISHED_S)
        return published
