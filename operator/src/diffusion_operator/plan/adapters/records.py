# SPDX-License-Identifier: Apache-2.0
"""Comparison of a worker's record of an adapter with the desired one. Reported, never assumed.

Digest and identity are what an adapter is: where they are known, a record with them is the adapter wherever its bytes came from.
"""

from collections.abc import Sequence

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.source import identity
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter

SCALE_TOLERANCE = 1e-6
IN_PROGRESS = frozenset({RecordState.FETCHING, RecordState.LOADING})


def current_record(named: Sequence[AdapterRecord], desired: DesiredAdapter) -> AdapterRecord | None:
    """Pick the record closest to the desired adapter among those that do not drain, since versions of a name may coexist.

    None if all drain, or there is none.
    """
    staying = [one for one in named if one.state is not RecordState.DRAINING]
    return min(staying, key=lambda one: _distance(one, desired), default=None)


def other_version(named: Sequence[AdapterRecord], desired: DesiredAdapter) -> AdapterRecord | None:
    """Find a loaded record with content other than the desired one, which requests get until it is replaced.

    None if there is no such record.
    """
    loaded = (one for one in named if one.state is RecordState.LOADED)
    return next((one for one in loaded if not has_content(one, desired)), None)


def contradicts(found: str | None, expected: str | None) -> bool:
    """Return whether two identities of the same converter differ.

    False if either is None, or if their converters differ and so cannot be compared.
    """
    if found is None or expected is None or converter_of(found) != converter_of(expected):
        return False
    return found != expected


def converter_of(effect: str) -> str:
    """Return the version of the converter that an identity was made with: the part before its first colon."""
    return effect.partition(":")[0]


def has_content(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the record has the desired bytes and components, loaded or ready to load.

    If either digest is unknown, the source decides.
    """
    if record.state not in (RecordState.LOADED, RecordState.CACHED):
        return False
    if record.digest is not None and desired.load.digest is not None:
        same = record.digest == desired.load.digest
    else:
        same = comes_from(record, desired)
    same = same and not contradicts(record.identity, desired.load.identity)
    return same and (not desired.load.components or set(record.components) <= set(desired.load.components))


def in_memory(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the record is loaded on all ranks with the desired content."""
    return record.state is RecordState.LOADED and record.ranks_loaded == record.ranks_total and has_content(record, desired)


def in_place(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the record has the desired content in memory on all ranks, or Cached.

    Cached is not enough where the residency is Resident.
    """
    may_leave = desired.load.residency is not Residency.RESIDENT
    return in_memory(record, desired) or (may_leave and record.state is RecordState.CACHED and has_content(record, desired))


def is_deferred(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether a sleeping replica will load the desired adapter at its wake, before it serves.

    Digests identify the adapter; if either is unknown, the source does.
    """
    if record.state is not RecordState.DEFERRED:
        return False
    known = record.digest is not None and desired.load.digest is not None
    return record.digest == desired.load.digest if known else comes_from(record, desired)


def is_coming(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the replica is fetching or loading the adapter from the source that is desired now, not from an earlier one."""
    return record.state in IN_PROGRESS and comes_from(record, desired)


def error_of(record: AdapterRecord, desired: DesiredAdapter) -> WireError | None:
    """Return the record's error if it is the reason why the wanted version does not serve; None without an error.

    A record that serves has the error of the load that should have replaced its version. Any other record's error counts only if the
    record is of the wanted source.
    """
    return record.error if record.state is RecordState.LOADED or comes_from(record, desired) else None


def is_told(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the worker has the desired scale, residency and priority, which it takes over without a load."""
    load = desired.load
    return abs(record.scale - load.scale) < SCALE_TOLERANCE and record.residency is load.residency and record.priority == load.priority


def comes_from(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Return whether the worker took the adapter from the desired source: the one in the spec, or the commit to which that was resolved."""
    return identity(record.source) in (desired.declared, identity(desired.load.source))


def _distance(record: AdapterRecord, desired: DesiredAdapter) -> int:
    if has_content(record, desired):
        return 0
    if record.state is not RecordState.LOADED and comes_from(record, desired):
        return 1  # being fetched, or failed: what has become of the wanted one
    return 2 if record.state is not RecordState.LOADED else 3
