# SPDX-License-Identifier: Apache-2.0
"""What has become of having adapters loaded: from the answer to a push, and from what state documents say later.

A push outlives its call where a file is fetched, so most failures are told by a document and not by an answer. Evictions that nobody
asked for are counted here, so that an engine that throws out what it was just given is not fed without end.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.errors import ControlError, ControlRefused
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.error_codes import FINAL, RELOAD_LOOP
from diffusion_operator.plan.adapters.records import current_record, error_of, in_memory, in_place, is_coming, is_deferred
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey
from diffusion_operator.plan.observed.replica_state import Group

BACKOFF_FIRST_S = 10.0
BACKOFF_MAX_S = 600.0
SETTLE_S = 5.0  # before a push that was taken, or went unanswered, is made again
RACE_RETRY_S = 1.0
STUCK_GRACE_S = 30.0  # past its deadline the worker itself should have ended a load
THRASH_WINDOW = timedelta(minutes=10)
THRASH_LIMIT = 3

RACES = frozenset({"Busy", "Asleep", "Starting", "Conflict", "WrongBoot", "Terminating"})
"""The worker moved on between our look and our call: no fault of the adapter's, look again."""


def attempt_key(group: Group, desired: DesiredAdapter) -> AttemptKey:
    """For a replica that has answered."""
    return AttemptKey(adapter_uid=desired.uid, generation=desired.generation, boot_id=group.boot_id or "")


def next_attempt(before: Attempt | None, error: ControlError | None, *, now: datetime) -> Attempt:
    """After a push."""
    before = before or Attempt(count=0, next_retry=now)
    count = before.count + 1
    if not isinstance(error, ControlRefused):
        # Longer each time: a worker that takes it and does not change would be asked every five seconds for ever.
        pause_s = min(BACKOFF_MAX_S, SETTLE_S * 2 ** max(0, min(count, 10) - 3))
        return _pushed(before, count=count, next_retry=now + timedelta(seconds=pause_s))
    if error.code in RACES:
        return _pushed(before, count=before.count, next_retry=now + timedelta(seconds=error.retry_after_s or RACE_RETRY_S))
    wire = WireError(code=error.code, message=str(error), retry_after_seconds=error.retry_after_s)
    return failed(msgspec.structs.replace(before, count=count), wire, now=now)


def failed(attempt: Attempt, error: WireError, *, now: datetime) -> Attempt:
    """It did not work: another try later, or none where the same bytes would be refused again."""
    backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(max(attempt.count - 1, 0), 10))
    delay_s = max(backoff_s, error.retry_after_seconds or 0)
    wire = WireError(code=error.code, message=error.message, retryable=error.code not in FINAL)
    return msgspec.structs.replace(attempt, error=wire, next_retry=now + timedelta(seconds=delay_s), in_progress=False)


def learn(
    attempts: Mapping[AttemptKey, Attempt], groups: tuple[Group, ...], desired: DesiredAdapter, *, now: datetime
) -> dict[AttemptKey, Attempt]:
    """One adapter's attempts with what the replicas say now. `groups` are awake or asleep, and have answered."""
    learned = {}
    for group in groups:
        if group.document is None:
            continue
        key = attempt_key(group, desired)
        before = attempts.get(key)
        after = _learned(before, current_record(group.document, desired), desired, now=now)
        if after is not None:
            learned[key] = after
    return learned


def _learned(before: Attempt | None, record: AdapterRecord | None, desired: DesiredAdapter, *, now: datetime) -> Attempt | None:
    attempt = _forget_evictions(before, now) if before is not None else Attempt(count=0, next_retry=now)
    if record is not None and in_memory(record, desired):
        error = attempt.error if attempt.error is not None and attempt.error.code == RELOAD_LOOP else None
        return msgspec.structs.replace(attempt, loaded=True, in_progress=False, error=error)
    if attempt.loaded and _lost(record, desired):
        return _evicted(attempt, now)
    if record is not None and (in_place(record, desired) or is_deferred(record, desired)):  # out of memory where it may be
        return msgspec.structs.replace(attempt, loaded=False, in_progress=False, error=None)
    if record is not None and is_coming(record, desired):
        return _watched(attempt, desired, now)
    attempt = msgspec.structs.replace(attempt, loaded=False)
    tried = attempt.count > 0 or attempt.in_progress  # what failed before anybody looked is tried once more at once
    error = error_of(record, desired) if record is not None else None
    if error is not None and tried and attempt.error is None:
        return failed(attempt, error, now=now)
    return attempt if before is not None else None


def _lost(record: AdapterRecord | None, desired: DesiredAdapter) -> bool:
    """Gone, or out of memory and never meant to leave it. One that failed meanwhile has an error of its own to tell."""
    return record is None or (record.state is RecordState.CACHED and not in_place(record, desired))


def _evicted(attempt: Attempt, now: datetime) -> Attempt:
    evictions = (*attempt.evictions, now)
    attempt = msgspec.structs.replace(attempt, loaded=False, evictions=evictions, next_retry=now, error=None)
    if len(evictions) <= THRASH_LIMIT:
        return attempt
    message = f"evicted {len(evictions)} times in {THRASH_WINDOW.seconds // 60} minutes; it is not loaded again until its spec changes"
    return msgspec.structs.replace(attempt, error=WireError(code=RELOAD_LOOP, message=message))


def _watched(attempt: Attempt, desired: DesiredAdapter, now: datetime) -> Attempt:
    if attempt.in_progress:
        return attempt
    stuck_at = now + timedelta(seconds=desired.load_timeout_s + STUCK_GRACE_S)
    return msgspec.structs.replace(attempt, in_progress=True, error=None, next_retry=stuck_at)


def _pushed(before: Attempt, *, count: int, next_retry: datetime) -> Attempt:
    return Attempt(count=count, next_retry=next_retry, loaded=before.loaded, evictions=before.evictions)


def _forget_evictions(attempt: Attempt, now: datetime) -> Attempt:
    recent = tuple(when for when in attempt.evictions if now - when < THRASH_WINDOW)
    return attempt if recent == attempt.evictions else msgspec.structs.replace(attempt, evictions=recent)
