# SPDX-License-Identifier: Apache-2.0
"""Everything a plan for a DiffusionDeployment may look at, as values."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.plan.observed.children import ChildState
from diffusion_operator.plan.observed.pods import Pod

UNREACHABLE_TRIES = 3
UNREACHABLE_AFTER = timedelta(seconds=15)


class Poll(msgspec.Struct, frozen=True):
    """The knowledge of one server process: its last state document, and how often it could not be reached since.

    A worker's ages are of the moment of its answer, and its answer stands until something changes. So they are read here, with the
    time since then.
    """

    state: WorkerState | None = None
    since_s: float = 0.0
    """Seconds since that document came, by the operator's clock."""
    failures: int = 0
    """Tries to reach it that failed, the loss of a connection among them."""
    failing_for: timedelta = timedelta(0)
    """Since the connection was lost, or could not be made."""
    error: str = ""

    @property
    def fresh(self) -> bool:
        return self.state is not None and self.failures == 0

    @property
    def draining(self) -> bool:
        """True if the worker said that it drains before the end of its pod, and accepts nothing any more."""
        return self.state is not None and self.state.draining

    @property
    def unreachable(self) -> bool:
        """True if three calls or more have failed in a row, over 15 s or longer; a busy node may miss a single one."""
        return self.failures >= UNREACHABLE_TRIES and self.failing_for >= UNREACHABLE_AFTER

    @property
    def state_age_s(self) -> float:
        """Seconds that the worker has been in its state, by now; 0 without a document."""
        return self.state.state_age_seconds + self.since_s if self.state is not None else 0.0

    @property
    def request_age_s(self) -> float | None:
        """Seconds since the worker's last request; 0 while it has one, None before the first and without a document."""
        return self.aged(self.state.last_request_age_seconds) if self.state is not None else None

    def aged(self, age_s: float | None) -> float | None:
        """Return an age of the document as it is now. An age that was 0 because a request ran stays 0 until the worker says otherwise."""
        return None if age_s is None else age_s + self.since_s if age_s or not self._busy else 0.0

    @property
    def _busy(self) -> bool:
        return self.state is not None and bool(self.state.in_flight or self.state.queued or self.state.held.current)


class AttemptKey(msgspec.Struct, frozen=True, gc=False):
    """Key by which tries to load an adapter are counted together.

    A changed spec of the adapter (`generation`) or a restarted server process (`boot_id`) begins a new count.
    """

    adapter_uid: str
    generation: int
    boot_id: str


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """State of the loads of an adapter on one life of a worker. Without an error the load succeeded, is in progress or has yet to come."""

    count: int
    """Pushes."""
    next_retry: datetime
    """While it is in progress: when it is taken for stuck."""
    error: WireError | None = None
    in_progress: bool = False
    loaded: bool = False
    """It was in memory at the last look."""
    evictions: tuple[datetime, ...] = ()
    """Evictions of the last ten minutes: in memory at one look, supposed to stay, and gone at the next."""


AdapterPlace = tuple[str, str]
"""Boot id and name."""


class Departures(msgspec.Struct, frozen=True):
    owners: Mapping[str, ObjectMeta] = {}
    """The adapter that had a name last, by the name. Nobody has it any more, and a replica holds it."""
    leaving: Mapping[AdapterPlace, ObjectMeta] = {}
    """Adapters that were asked to leave and are still there."""


class Answer(StrEnum):
    """The verdict of a dry run on a template."""

    FINE = "Fine"
    REFUSED = "Refused"
    UNDECIDED = "Undecided"


class TemplateTrial(msgspec.Struct, frozen=True):
    """The API server's answer to the question whether it would make a pod of a template."""

    revision: str
    generation: int
    """The deployment's then."""
    answer: Answer
    tried_at: datetime
    since: datetime
    """When it first said so."""
    message: str = ""


class TemplateCheck(msgspec.Struct, frozen=True):
    """The verdict of a template's check pod, or the present try."""

    revision: str
    since: datetime
    """When the try began."""
    answer: Answer = Answer.UNDECIDED
    message: str = ""
    """For the condition if the last try has failed, for an Event if it has passed."""
    again_at: datetime | None = None
    """When the verdict is due, or the next try."""


class Asleep(msgspec.Struct, frozen=True):
    """A deployment's replicas that sleep, and keep their devices."""

    namespace: str
    name: str
    devices: frozenset[str]
    replicas: int


class Observed(msgspec.Struct, frozen=True):
    deployment: DiffusionDeployment
    default_image: str
    pods: tuple[Pod, ...] = ()
    foreign_incarnations: Mapping[int, int] = {}
    """Highest incarnation by index among pods of an earlier deployment of this name, or of somebody else: their names are taken."""
    polls: Mapping[str, Poll] = {}
    """The last poll of each pod, by UID."""
    adapters: tuple[LoRAAdapter, ...] = ()
    attempts: Mapping[AttemptKey, Attempt] = {}
    """Those that calls since the last plan came to. It knows the others."""
    departures: Departures = Departures()
    calling: frozenset[str] = frozenset()
    """UIDs of pods whose worker has a control call unanswered."""
    operation_not_before: Mapping[str, datetime] = {}
    """When a sleep or wake may be tried again, by plan.sleep.policy.retry_key."""
    unrouted_at: Mapping[str, datetime] = {}
    """Times at which this process removed the routable label, by pod UID."""
    undrained: frozenset[str] = frozenset()
    """UIDs of pods whose worker did not take the call to drain."""
    trial: TemplateTrial | None = None
    """The last one."""
    check: TemplateCheck | None = None
    """The last one."""
    checks: tuple[Pod, ...] = ()
    """Check pods, terminating ones too."""
    policy_possible: bool = False
    """The operator knows the labels of its own pods, so that it can make a NetworkPolicy."""
    children: tuple[ChildState, ...] = ()
    """After the pass before."""
    warnings: Mapping[str, str] = {}
    """The last Warning among the Events of each pod that waits and does not say for what, by UID."""
    asleep: tuple[Asleep, ...] = ()
    """All deployments, where a pod of this one has no node."""
    refusal: str = ""
    """The API server's last refusal to create a pod (quota, Pod Security); empty if it accepted."""

    def leaves(self, pod: Pod) -> bool:
        """Return whether a pod is on its way out: it was deleted, or is drained before that."""
        return pod.terminating or self.polls.get(pod.uid, Poll()).draining
