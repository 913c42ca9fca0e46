# SPDX-License-Identifier: Apache-2.0
"""The state of a deployment's children after a pass, and what it means for its pods and its conditions."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from diffusion_operator.api.meta import Verdict, verdict
from diffusion_operator.api.names import CONFIG_MAP, NETWORK_POLICY, SECRET, SERVICE, Kind
from diffusion_operator.pauses import Backoff

NAME_CONFLICT = "NameConflict"
LEAVING = "EarlierObjectLeaving"
CONTESTED = "ChildContested"
ANOTHER_OPERATOR = "AnotherOperator"
REFUSED = "Refused"
PASS_FAILED = "PassFailed"
REFUSALS = frozenset(
    {
        "BadRequest", "Forbidden", "Invalid", "RequestEntityTooLarge", "TooManyRequests", "InternalError", "ServiceUnavailable", "Timeout",
        "ServerTimeout", "Conflict", "NotFound", "MethodNotAllowed", "Unauthorized",
    }
)  # fmt: skip
"""Reasons of the API server that a condition repeats. An admission webhook may answer any other, which becomes `Refused`."""

CONTEST_AFTER = 3
"""Repairs within CONTEST_WINDOW. After them a child is put back at the pace of CONTEST_PACE."""
CONTEST_WINDOW = timedelta(minutes=10)
CONTEST_PACE = timedelta(minutes=10)
CONTEST_PACE_URGENT = timedelta(minutes=1)
"""The pace for a NetworkPolicy, for a child that is missing, and for a Service that leads elsewhere."""
OPERATORS_PACE = timedelta(seconds=10)
"""The pace for a child that another operator writes: one of another release that watches the same namespace."""
PAUSES = {NAME_CONFLICT: timedelta(seconds=60), CONTESTED: timedelta(seconds=1), ANOTHER_OPERATOR: timedelta(seconds=1)}
"""Pauses by reason, where they do not grow with the count of tries."""
RETRY = Backoff(first_s=1, longest_s=60)
TOLD_AFTER = 3
"""Tries, where the error is one that passes."""
SILENT_FOR = timedelta(seconds=60)
"""An earlier object's child goes with it, usually within seconds."""


class Change(NamedTuple):
    """A difference of the live child from the rendered one."""

    text: str
    """A sentence for users. Empty where no other client made the change."""
    misroutes: bool = False
    """The child is a Service, which leads to other pods or lacks its port."""


UNTOLD = Change("")


class ChildState(msgspec.Struct, frozen=True):
    """The result of reconciling a child object of a deployment: present or not, and the reason for a difference from the spec."""

    kind: str
    name: str
    ours: bool
    """Our object is there, though maybe not as the spec asks."""
    reason: str = ""
    """Empty where it is as the spec asks."""
    message: str = ""
    passing: bool = False
    """A conflict, or an API server that is away: usually over at the next try."""
    silent: bool = False
    """It may take this long; no condition is False for it yet."""
    not_before: datetime | None = None
    """The earliest time of the next try, where its reason sets one."""
    misroutes: bool = False
    """It is a Service, and another client has made it lead to other pods or taken its port."""

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}"


class ChildTry(msgspec.Struct, frozen=True):
    """A child that is not as the spec asks: what was found, and when it is tried again."""

    state: ChildState
    content: str
    """A hash of what was asked for: other content is tried at once."""
    count: int
    since: datetime
    """When it was first found so."""
    again_at: datetime


def tried(before: ChildTry | None, state: ChildState, *, content: str, now: datetime) -> ChildTry:
    """Return the record of a try that did not succeed: the next comes after 1, 2, 4 … 60 s while the reason stays the same.

    A name that a stranger's object has is tried each minute, and a contested child at its `not_before`.
    """
    same = before is not None and before.state.reason == state.reason
    count, since = (before.count + 1, before.since) if before is not None and same else (1, now)
    wait = PAUSES.get(state.reason) or timedelta(seconds=RETRY.after_s(count))
    leaves = state.reason == LEAVING and now - since < SILENT_FOR
    anothers_for_now = state.reason == ANOTHER_OPERATOR and now - since < SILENT_FOR
    silent = leaves or anothers_for_now or (state.passing and count < TOLD_AFTER)
    again_at = min(now + wait, since + SILENT_FOR) if leaves else max(now + wait, state.not_before or now)
    return ChildTry(state=msgspec.structs.replace(state, silent=silent), content=content, count=count, since=since, again_at=again_at)


class Repairs(msgspec.Struct, frozen=True):
    """The last times when a change of a child by others was put back, in order."""

    times: tuple[datetime, ...] = ()
    contested: bool = False
    """The last of them was put off, because there had been many."""

    def next_at(self, kind: Kind, now: datetime, *, useless: bool) -> datetime:
        """Return the earliest time of the next repair, so that the operator does not fight other clients without a pause.

        It is `now` until a third repair within ten minutes. From then on repairs are ten minutes apart, until a contest has been quiet for
        twenty. They are a minute apart for a NetworkPolicy and for a `useless` child: missing, or a Service that leads elsewhere.
        """
        many = len([when for when in self.times if now - when < CONTEST_WINDOW]) >= CONTEST_AFTER
        if not (many or self._goes_on(now)):
            return now
        return max(now, self.times[-1] + (CONTEST_PACE_URGENT if useless or kind == NETWORK_POLICY else CONTEST_PACE))

    def put_off(self) -> "Repairs":
        return Repairs(times=self.times, contested=True)

    def and_now(self, now: datetime) -> "Repairs":
        """Return the repairs with one more at `now`; only the last three are kept."""
        return Repairs(times=(*self.times, now)[-CONTEST_AFTER:], contested=self._goes_on(now))

    def _goes_on(self, now: datetime) -> bool:
        """Return whether the contest continues; it ends after a window without repairs."""
        return self.contested and now - self.times[-1] < CONTEST_PACE + CONTEST_WINDOW


def contested(kind: Kind, name: str, change: Change, *, ours: bool, not_before: datetime) -> ChildState:
    """Build the state of a contested child, which differs from the spec by `change`."""
    contest = f"{change.text}; another client or an admission webhook changes it each time, so the operator puts it back less often"
    return ChildState(
        kind=kind.kind, name=name, ours=ours, reason=CONTESTED, message=contest, not_before=not_before, misroutes=change.misroutes
    )


def anothers(kind: Kind, name: str, *, not_before: datetime) -> ChildState:
    """Return the state of a child that another operator writes. It is no contest: the child is put back as soon as that one has ended."""
    rival = f"{kind.kind} {name} is written by another operator: two releases watch this namespace; this one puts it back each ten seconds"
    return ChildState(kind=kind.kind, name=name, ours=True, reason=ANOTHER_OPERATOR, message=rival, passing=True, not_before=not_before)


def hurried(known: ChildTry, now: datetime) -> ChildTry:
    """Return the record of a try that is due at once."""
    return msgspec.structs.replace(known, again_at=now)


def stranger(kind: Kind, name: str) -> ChildState:
    stranger_found = f"{kind.kind} {name} is not managed by this DiffusionDeployment and is left alone"
    name_conflict = f"{stranger_found}; delete or rename it, or give the deployment another name"
    return ChildState(kind=kind.kind, name=name, ours=False, reason=NAME_CONFLICT, message=name_conflict)


def leaving(kind: Kind, name: str) -> ChildState:
    wait = f"{kind.kind} {name} belongs to an earlier DiffusionDeployment of this name; the operator makes it again when it is deleted"
    return ChildState(kind=kind.kind, name=name, ours=False, reason=LEAVING, message=wait)


def refused(
    kind: Kind, name: str, *, ours: bool, reason: str, message: str, passing: bool, not_before: datetime | None = None
) -> ChildState:
    """Build the state of a child that the API server refused; `reason`, `message` and `not_before` are the server's.

    A reason that conditions do not repeat becomes `Refused`.
    """
    known = reason if reason in REFUSALS else REFUSED
    refusal = f"the API server did not accept a write of {kind.kind} {name}: {message}"
    return ChildState(kind=kind.kind, name=name, ours=ours, reason=known, message=refusal, passing=passing, not_before=not_before)


def children_ready(children: Sequence[ChildState]) -> Verdict:
    """Build the condition ChildrenReady: True if no child differs from the spec, Unknown if only `silent` ones do, else False.

    A child that is `ours`, `silent` and `passing` does not count. The message covers every child that does, and the first gives the reason.
    Silent children are sorted last, and otherwise NameConflict first.
    """
    told = [one for one in children if one.reason and not (one.passing and one.silent and one.ours)]
    missing = sorted(told, key=lambda one: (one.silent, one.reason != NAME_CONFLICT))
    if not missing:
        text = "every Secret, ConfigMap, Service, NetworkPolicy and PodDisruptionBudget of this object is as the spec asks"
        return verdict("ChildrenReady", True, "AllApplied", text)
    worst = missing[0]
    known = None if worst.silent else False
    return verdict("ChildrenReady", known, worst.reason, "; ".join(child.message for child in missing))


def pods_wait_for(children: Sequence[ChildState]) -> str:
    """Return why no pod can be made: messages about the operator's own Secret and ConfigMap that pods mount, joined by '; '.

    Each names one that another object's name keeps away, or that the API server refused. Empty if both are there.
    """
    mounted = (one for one in children if one.kind in (SECRET.kind, CONFIG_MAP.kind))
    return "; ".join(one.message for one in mounted if not one.ours)


def no_service(children: Sequence[ChildState]) -> str:
    """Return the message of the first Service that cannot bring clients here: it is not ours, or its traffic goes elsewhere.

    Empty if there is none.
    """
    return next((one.message for one in children if one.kind == SERVICE.kind and (not one.ours or one.misroutes)), "")


def policy_refusal(children: Sequence[ChildState]) -> str:
    """Return why the NetworkPolicy is not as the spec asks. Empty where it is, or where there is none."""
    return next((one.message for one in children if one.kind == NETWORK_POLICY.kind and not one.silent), "")
