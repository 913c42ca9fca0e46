# SPDX-License-Identifier: Apache-2.0
"""State documents of several answers as one. Records of adapters that did not change are the same objects from one to the next."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from diffusion_operator.api.worker_state import AdapterRecord, WorkerState

_FIELDS = tuple(name for name in WorkerState.__struct_fields__ if name != "adapters")


def together(pages: Sequence[WorkerState]) -> WorkerState:
    """Return one answer of several pages. A name that comes twice changed meanwhile, and the later page is right."""
    first, *others = pages
    if not others:
        return first
    named = {name: records for page in pages for name, records in page.named.items()}
    return _with_adapters(msgspec.structs.replace(first, adapters_continue=None), named)


def merged(before: WorkerState | None, answer: WorkerState) -> WorkerState:
    """Return the whole state after an answer that may tell differences only. A record that did not change is the same object."""
    if before is None or before.boot_id != answer.boot_id:
        return answer
    known = before.named
    if answer.adapters_since is None:
        named = {name: _kept(known.get(name, ()), records) for name, records in answer.named.items()}
        same = len(named) == len(known) and all(records is known.get(name) for name, records in named.items())
        return _with_adapters_of(before, answer) if same else _with_adapters(answer, named)
    whole = msgspec.structs.replace(answer, adapters_since=None, adapters_removed=())
    if not answer.adapters and not answer.adapters_removed:
        return _with_adapters_of(before, whole)
    gone = set(answer.adapters_removed)
    kept = {name: records for name, records in known.items() if name not in gone}
    return _with_adapters(whole, {**kept, **answer.named})


def _kept(before: tuple[AdapterRecord, ...], now: tuple[AdapterRecord, ...]) -> tuple[AdapterRecord, ...]:
    return before if len(before) == len(now) and all(map(_says_the_same, before, now)) else now


def _says_the_same(known: AdapterRecord, record: AdapterRecord) -> bool:
    """Compare without the age of the last request. It is dated when it comes, and tells something new only where the total moved."""
    if known == record:
        return True
    return msgspec.structs.replace(known, last_request_age_seconds=record.last_request_age_seconds) == record


def _with_adapters(state: WorkerState, named: Mapping[str, tuple[AdapterRecord, ...]]) -> WorkerState:
    """With these adapters, found by name already."""
    whole = msgspec.structs.replace(state, adapters=tuple(itertools.chain.from_iterable(named.values())))
    vars(whole).update(named=named)
    return whole


def _with_adapters_of(before: WorkerState, state: WorkerState) -> WorkerState:
    """With the adapters of `before`, found by name and counted already.

    All else that did not change is the same object, too: the last plan keeps an answer while later ones come.
    """
    same = {name: known for name in _FIELDS if (known := getattr(before, name)) == getattr(state, name)}
    whole = msgspec.structs.replace(state, **same | {"adapters": before.adapters})
    vars(whole).update(named=before.named, record_states=before.record_states)
    return whole
