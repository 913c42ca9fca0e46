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

UNREACHABLE_POLLS = 3
UNREACHABLE_AFTER = timedelta(seconds=15)


class Poll(msgspec.Struct, frozen=True):
    """What is known of one server process: its last state document, and how many polls failed since."""

    state: WorkerState | None = None
    failures: int = 0
    failing_for: timedelta = timedelta(0)
    error: str = ""

    @property
    def fresh(self) -> bool:
        return self.state is not None and self.failures == 0

    @property
    def unreachable(self) -> bool:
        """A single failed poll says nothing: a busy node may take seconds."""
        return self.failures >= UNREACHABLE_POLLS and self.failing_for >= UNREACHABLE_AFTER


class AttemptKey(msgspec.Struct, frozen=True):
    """An attempt counts for one spec of one adapter in one life of one server process."""

    adapter_uid: str
    generation: int
    boot_id: str


class Attempt(msgspec.Struct, frozen=True):
    """What came of having an adapter loaded; error None means the worker has it, or is still at it."""

    count: int
    """Pushes."""
    next_retry: datetime
    """While it is in progress: when it is taken for stuck."""
    error: WireError | None = None
    in_progress: bool = False
    loaded: bool = False
    """It was in memory at the last look."""
    evictions: tuple[datetime, ...] = ()
    """Of the last ten minutes: it was in memory, should have stayed there, and was not at the next look."""


AdapterPlace = tuple[str, str]
"""Boot id and name."""


class Departures(msgspec.Struct, frozen=True):
    owners: Mapping[str, ObjectMeta] = {}
    """By name: the adapter that has it, or had it last."""
    leaving: Mapping[AdapterPlace, ObjectMeta] = {}
    """What was told to go and has not gone yet."""


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


class Observed(msgspec.Struct, frozen=True):
    deployment: DiffusionDeployment
    default_image: str
    pods: tuple[Pod, ...] = ()
    foreign_incarnations: Mapping[int, int] = {}
    """Highest incarnation by index among pods of an earlier deployment of this name, or of somebody else: their names are taken."""
    polls: Mapping[str, Poll] = {}
    """By pod UID."""
    adapters: tuple[LoRAAdapter, ...] = ()
    attempts: Mapping[AttemptKey, Attempt] = {}
    departures: Departures = Departures()
    operation_not_before: Mapping[str, datetime] = {}
    """When a sleep or wake may be tried again, by plan.sleeping.retry_key."""
    unrouted_at: Mapping[str, datetime] = {}
    """By pod UID: when this process took the routable label off."""
    trial: TemplateTrial | None = None
    """The last one."""
    policy_possible: bool = False
    """The operator knows the labels of its own pods, so that it can make a NetworkPolicy."""
    children: tuple[ChildState, ...] = ()
    """After the pass before."""
    refusal: str = ""
    """Why the API server last refused to create a pod (quota, Pod Security), empty if it did not."""
