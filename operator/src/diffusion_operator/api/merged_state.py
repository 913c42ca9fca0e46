# SPDX-License-Identifier: Apache-2.0
"""State documents of several answers as one. Records of adapters that did not change are the same objects from one to the next."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from diffusion_operator.api.worker_state import AdapterRecord, WorkerState

_FIELDS = tuple(name for name in WorkerState.__struct_fields__ if name != "adapters")


def together(pages: Sequence[WorkerState]) -> WorkerState:
    """Join the pages of one answer: the first page, with the adapters of all pages. A single page is returned as it is.

    A name that comes twice changed meanwhile, and its records in the later page count.
    """
    first, *others = pages
    if not others:
        return first
    named = {name: records for page in pages for name, records in page.named.items()}
    return _with_adapters(msgspec.structs.replace(first, adapters_continue=None), named)


def merged(before: WorkerState | None, answer: WorkerState) -> WorkerState:
    """Return the whole state of a worker after `answer`, which may have only the adapters that changed since `before`.

    Returns `answer` itself if there is no earlier state, or if the worker restarted since.
    Records of names without a change are the same objects as in `before`.
    """
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
