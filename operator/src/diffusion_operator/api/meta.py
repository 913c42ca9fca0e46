# SPDX-License-Identifier: Apache-2.0
"""Fields that both kinds share: the part of metadata we read, and conditions as Kubernetes defines them."""

from datetime import datetime
from enum import StrEnum

import msgspec


class ObjectMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The part of an object's metadata that decisions need."""

    name: str
    namespace: str
    uid: str
    creation_timestamp: datetime
    generation: int = 1
    deletion_timestamp: datetime | None = None
    annotations: dict[str, str] = {}


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A metav1.Condition."""

    type: str
    status: ConditionStatus
    last_transition_time: datetime
    reason: str
    message: str
    observed_generation: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """A condition before it has a time: what a decision says."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def verdict(type_: str, value: bool | None, reason: str, message: str) -> Verdict:
    """Build a verdict. A `value` of None gives the status Unknown, and the message is cut to 2048 characters."""
    status = ConditionStatus.UNKNOWN if value is None else ConditionStatus.TRUE if value else ConditionStatus.FALSE
    return Verdict(type=type_, status=status, reason=reason, message=message[:2048])


def settle_conditions(
    verdicts: tuple[Verdict, ...], *, previous: tuple[Condition, ...], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return a condition for each verdict; earlier conditions without a verdict are dropped.

    `now` is the lastTransitionTime of a new type or a changed status; otherwise the earlier time stays.
    """
    before = {condition.type: condition for condition in previous}
    return tuple(
        Condition(
            type=new.type,
            status=new.status,
            reason=new.reason,
            message=new.message,
            observed_generation=generation,
            last_transition_time=old.last_transition_time if (old := before.get(new.type)) and old.status is new.status else now,
        )
        for new in verdicts
    )


def condition_of(conditions: tuple[Condition, ...], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def reason_of(conditions: tuple[Condition, ...], type_: str) -> str:
    """Look up a condition by its type and return its reason; an empty string if it is missing."""
    condition = condition_of(conditions, type_)
    return condition.reason if condition is not None else ""
