# SPDX-License-Identifier: Apache-2.0
"""Outcomes of adapter loads: from the answer to a push, and from later state documents.

A push outlives its call while a file is fetched, so most failures arrive in a state document instead of the answer. Evictions that nobody
asked for are counted here, so that an engine that throws out what it was just given is not fed without end.
"""

from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.errors import ControlError, ControlRefused
from diffusion_operator.pauses import Backoff
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.error_codes import FINAL, RELOAD_LOOP
from diffusion_operator.plan.adapters.records import error_of, in_memory, in_place, is_coming, is_deferred
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey
from diffusion_operator.plan.observed.replica_state import Group

REFUSED = Backoff(first_s=10.0, longest_s=600.0)
"""The longest pause comes at once after an error that the same bytes would bring again: the bytes of a source may become others."""
SETTLE = Backoff(first_s=5.0, longest_s=600.0)
"""Before a push that was taken, or went unanswered, is made again. The first three come at one pace."""
RACE_RETRY_S = 1.0
STUCK_GRACE_S = 30.0  # past its deadline the worker itself should have ended a load
THRASH_WINDOW = timedelta(minutes=10)
THRASH_LIMIT = 3

RACES = frozenset({"Busy", "Asleep", "Starting", "Conflict", "WrongBoot", "StaleEpoch", "Terminating"})
"""The worker moved on between our look and our call: no fault of the adapter's, look again."""


def attempt_key(group: Group, desired: DesiredAdapter) -> AttemptKey:
    """Return the key under which tries of this spec's adapter on this life of a worker are kept; the replica must have answered."""
    return AttemptKey(adapter_uid=desired.uid, generation=desired.generation, boot_id=group.boot_id or "")


def next_attempt(before: Attempt | None, error: ControlError | None, *, now: datetime) -> Attempt:
    """Return the attempt after a push; `error` is None if the worker took it.

    Without an answer or an error the push may be repeated after 5 s, later after longer pauses.
    A worker that moved on meanwhile is asked again soon, and the try does not count. Other refusals count as `failed`.
    """
    before = before or Attempt(count=0, next_retry=now)
    count = before.count + 1
    if not isinstance(error, ControlRefused):
        # Longer each time: a worker that takes it and does not change would be asked every five seconds for ever.
        pause_s = SETTLE.after_s(max(count - 2, 1))
        return _pushed(before, count=count, next_retry=now + timedelta(seconds=pause_s))
    if error.code in RACES:
        return _pushed(before, count=before.count, next_retry=now + timedelta(seconds=error.retry_after_s or RACE_RETRY_S))
    wire = WireError(code=error.code, message=str(error), retry_after_seconds=error.retry_after_s)
    return failed(msgspec.structs.replace(before, count=count), wire, now=now)


def failed(attempt: Attempt, error: WireError, *, now: datetime) -> Attempt:
    """Return the attempt with its error and the time of the next try: after 10 s, doubled with each try up to 10 minutes.

    It is 10 minutes at once if the same bytes would be refused again. A longer pause that the worker asks for counts.
    """
    backoff_s = REFUSED.longest_s if error.code in FINAL else REFUSED.after_s(max(attempt.count, 1))
    delay_s = max(backoff_s, error.retry_after_seconds or 0)
    wire = WireError(code=error.code, message=error.message, retryable=error.code not in FINAL)
    return msgspec.structs.replace(attempt, error=wire, next_retry=now + timedelta(seconds=delay_s), in_progress=False)


def recalled(adapter: LoRAAdapter, boot_id: str, now: datetime) -> Attempt | None:
    """Return the attempt that an earlier process of the operator left in the adapter's status, for one life of a server process.

    None if the status is of another generation, or has no failed try there.
    """
    if adapter.status.observed_generation != adapter.metadata.generation:
        return None
    said = next((one for one in adapter.status.replica_instances if one.boot_id == boot_id), None)
    if said is None or said.attempts is None or said.last_error is None:
        return None
    error = said.last_error
    wire = WireError(code=error.code or "", message=error.message or "", retryable=bool(error.retryable))
    return Attempt(count=said.attempts, next_retry=said.next_retry_time or now, error=wire)


def learned(before: Attempt | None, record: AdapterRecord | None, desired: DesiredAdapter, *, now: datetime) -> Attempt | None:
    """Return the attempt after what an awake or sleeping replica says now; `record` is its record of the adapter, if any.

    It notes a load, an eviction, progress or a failure. None if there was no attempt and there is nothing to note.
    """
    attempt = _forget_evictions(before, now) if before is not None else Attempt(count=0, next_retry=now)
    if record is not None and in_memory(record, desired):
        loops = attempt.error is not None and attempt.error.code == RELOAD_LOOP and attempt.evictions
        error = attempt.error if loops else None
        return msgspec.structs.replace(attempt, loaded=True, in_progress=False, error=error)
    if attempt.loaded and _lost(record, desired):
        return _evicted(attempt, now)
    if record is not None and (in_place(record, desired) or is_deferred(record, desired)):  # out of memory where it may be
        return msgspec.structs.replace(attempt, loaded=False, in_progress=False, error=None)
    if record is not None and is_coming(record, desired):
        return _watched(attempt, desired, now)
    attempt = msgspec.structs.replace(attempt, loaded=False)
    tried = attempt.count > 0 or attempt.in_progress  # A load that failed before the first look is retried once at once
    error = error_of(record, desired) if record is not None else None
    if error is not None and tried and attempt.error is None:
        return failed(attempt, error, now=now)
    return attempt if before is not None else None


def _lost(record: AdapterRecord | None, desired: DesiredAdapter) -> bool:
    """Return whether an adapter is gone, or out of memory though it may not leave it.

    A load that failed meanwhile reports its own error instead.
    """
    return record is None or (record.state is RecordState.CACHED and not in_place(record, desired))


def _evicted(attempt: Attempt, now: datetime) -> Attempt:
    evictions = (*attempt.evictions, now)
    attempt = msgspec.structs.replace(attempt, loaded=False, evictions=evictions, next_retry=now, error=None)
    if len(evictions) <= THRASH_LIMIT:
        return attempt
    minutes = THRASH_WINDOW.seconds // 60
    message = (
        f"this adapter was evicted {len(evictions)} times in {minutes} minutes. It is loaded again in {minutes} minutes, or when its spec "
        "changes. If the DiffusionDeployment has more adapters than its spec.lora.maxCached, raise that field"
    )
    return msgspec.structs.replace(attempt, error=WireError(code=RELOAD_LOOP, message=message), next_retry=now + THRASH_WINDOW)


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
