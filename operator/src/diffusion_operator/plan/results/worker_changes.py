# SPDX-License-Identifier: Apache-2.0
"""Changes of a replica between two looks at it, for metrics.

Both state documents were seen by the same operator process, so a restart counts nothing twice. Changes that nobody saw are in the worker's
own metrics.
"""

from collections.abc import Sequence

import msgspec

from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WorkerPhase, WorkerState
from diffusion_operator.plan.observed.states import SERVING_PHASES

_WRONG = "VerificationFailed"


class AdapterLoadTime(msgspec.Struct, frozen=True):
    seconds: float
    size_bytes: int


class WorkerChanges(msgspec.Struct, frozen=True):
    loads: tuple[AdapterLoadTime, ...] = ()
    evictions: int = 0
    """Adapters that went out of memory for others."""
    wrong_wakes: int = 0
    """Wakes that were given up because what they brought back was not what it was: the ranks are started again."""
    wrong_adapters: int = 0
    """Adapters that a wake found to be not what they were: they are loaded again."""


def happened(before: WorkerState | None, after: WorkerState) -> WorkerChanges:
    """Compare two state documents of a worker, and return the loads, evictions and failed verifications in between.

    Nothing is returned if `before` is None: an earlier process of the operator may have counted what `after` shows.
    """
    if before is None:
        return WorkerChanges()
    # All of what another process says is new.
    known = before if before.boot_id == after.boot_id else WorkerState(boot_id=after.boot_id, state=WorkerPhase.STARTING)
    changed = _changed(known, after)
    earlier = [one for name in {one.name for one in changed} for one in known.named.get(name, ())]
    told = {_load_of(one) for one in earlier}
    wrong = {one.name for one in earlier if one.verification_failed}
    return WorkerChanges(
        loads=tuple(
            AdapterLoadTime(seconds=one.load_seconds, size_bytes=one.size_bytes or 0)
            for one in changed
            if one.load_seconds is not None and _load_of(one) not in told
        ),
        evictions=_evictions(known, after, earlier, changed),
        wrong_wakes=_wrong_wakes(known, after),
        wrong_adapters=len({one.name for one in changed if one.verification_failed} - wrong),
    )


def _changed(before: WorkerState, after: WorkerState) -> list[AdapterRecord]:
    """Return the records that are not the same objects as before: the others did not change."""
    if after.adapters is before.adapters:
        return []
    same = set(map(id, before.adapters))
    return [one for one in after.adapters if id(one) not in same]


def _load_of(record: AdapterRecord) -> tuple[str, str | None, float | None]:
    """Return a key of an adapter's last load: name, digest and seconds.

    A repeated load has the same name and digest, but its seconds differ in the microseconds.
    """
    return record.name, record.digest, record.load_seconds


def _evictions(before: WorkerState, after: WorkerState, earlier: Sequence[AdapterRecord], changed: Sequence[AdapterRecord]) -> int:
    """Count the adapters that went from Loaded to Cached between two documents of a serving worker.

    Adapters that a sleep takes out of memory return at the wake and are no evictions.
    """
    if before.state not in SERVING_PHASES or after.state not in SERVING_PHASES:
        return 0
    in_memory = {(one.name, one.digest) for one in earlier if one.state is RecordState.LOADED}
    return sum(one.state is RecordState.CACHED and (one.name, one.digest) in in_memory for one in changed)


def _wrong_wakes(before: WorkerState, after: WorkerState) -> int:
    last, told = after.last_operation, before.last_operation
    if last is None or (told is not None and told.operation_id == last.operation_id):
        return 0
    return int(last.error is not None and last.error.code == _WRONG)
