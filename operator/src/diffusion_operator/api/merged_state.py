# SPDX-License-Identifier: Apache-2.0
"""A worker's state from one answer to the next: records of adapters that did not change are the same objects."""

import itertools
from collections.abc import Mapping

import msgspec

from diffusion_operator.api.worker_state import AdapterRecord, WorkerState

_FIELDS = tuple(name for name in WorkerState.__struct_fields__ if name != "adapters")


def merged(before: WorkerState | None, answer: WorkerState) -> WorkerState:
    """Return `answer` with the objects of `before` where they are equal: records of adapters by name, and all other fields.

    Returns `answer` itself if there is no earlier state, or if the worker restarted since.
    """
    if before is None or before.boot_id != answer.boot_id:
        return answer
    known = before.named
    named = {name: _kept(known.get(name, ()), records) for name, records in answer.named.items()}
    same = len(named) == len(known) and all(records is known.get(name) for name, records in named.items())
    return _with_adapters_of(before, answer) if same else _with_adapters(answer, named)


def _kept(before: tuple[AdapterRecord, ...], now: tuple[AdapterRecord, ...]) -> tuple[AdapterRecord, ...]:
    return before if len(before) == len(now) and all(map(_says_the_same, before, now)) else now


def _says_the_same(known: AdapterRecord, record: AdapterRecord) -> bool:
    """Return whether two records are equal, apart from the age of the last request.

    The age is dated when it comes, and is news only where the total moved.
    """
    if known == record:
        return True
    return msgspec.structs.replace(known, last_request_age_seconds=record.last_request_age_seconds) == record


def _with_adapters(state: WorkerState, named: Mapping[str, tuple[AdapterRecord, ...]]) -> WorkerState:
    """Return a copy of the state with the adapters of `named`, which it keeps as its index by name."""
    whole = msgspec.structs.replace(state, adapters=tuple(itertools.chain.from_iterable(named.values())))
    vars(whole).update(named=named)
    return whole


def _with_adapters_of(before: WorkerState, state: WorkerState) -> WorkerState:
    """Return a copy of `state` with the adapters of `before`, and with its index and counts of them.

    Each other field that did not change is the same object, too: the last plan keeps an answer while later ones come.
    """
    same = {name: known for name in _FIELDS if (known := getattr(before, name)) == getattr(state, name)}
    whole = msgspec.structs.replace(state, **same | {"adapters": before.adapters})
    vars(whole).update(named=before.named, record_states=before.record_states)
    return whole
