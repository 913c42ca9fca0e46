# SPDX-License-Identifier: Apache-2.0
"""Pending calls of many requests, arranged into calls of the real modules."""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable

import msgspec

from diffusion_worker.errors import Fault
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.model_call.call import ModelCall, group_key
from diffusion_worker.runner.model_call.faults import classify, require_usable_rank
from diffusion_worker.runner.step_cache.hooked_run import CacheVerdict
from diffusion_worker.runner.step_cache.interface import Branch
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState

log = logging.getLogger(__name__)

# Returns whether the model class of a call may share calls between requests at all.
MayMerge = Callable[[ModelCall], bool]


class Pending(msgspec.Struct, frozen=True, eq=False):
    """A request that waits for a model call.

    `prompt` is the call's key in the prompt cache, None if it has none. `branch` holds the step cache's values for it, None if the request
    goes without.
    """

    state: DiffusionRequestState
    call: ModelCall
    prompt: Hashable | None = None
    branch: Branch | None = None


class InputBatch(msgspec.Struct, frozen=True, eq=False):
    """Calls of one method of a module that run as one: their rows are stacked in the order of `items`, `rows[i]` of them for each."""

    items: list[Pending]

    @property
    def rows(self) -> list[int]:
        """The number of rows of each call, in the order of `items`."""
        return [item.call.rows for item in self.items]

    @property
    def loras(self) -> list[list[LoRAUse]]:
        """The adapters to apply, as one list per row of the batch."""
        return [item.state.spec.loras for item, count in zip(self.items, self.rows, strict=True) for _ in range(count)]

    def alone(self) -> list["InputBatch"]:
        """Split the batch into batches of a single request, in order."""
        return [InputBatch([item]) for item in self.items]

    def by_adapters(self) -> list["InputBatch"]:
        """Return the same calls, in a batch for each list of adapters with their strengths."""
        groups: dict[tuple[LoRAUse, ...], list[Pending]] = {}
        for item in self.items:
            groups.setdefault(tuple(item.state.spec.loras), []).append(item)
        return list(map(InputBatch, groups.values()))

    def by_verdict(self) -> list["InputBatch"]:
        """Return the same calls, in a batch for each verdict of the step cache."""
        groups: dict[CacheVerdict | None, list[Pending]] = {}
        for item in self.items:
            groups.setdefault(_verdict(item), []).append(item)
        return list(map(InputBatch, groups.values()))


def make_batches(pending: list[Pending], may_merge: MayMerge) -> list[InputBatch]:
    """Group the calls that may run now, in the order of their requests, which is the same on every rank.

    Calls outside a step (encoders, VAE) run first, and steps wait. A request that joins reaches its first step before the others take
    theirs, so that they share it. Among equal calls of a text encoder one runs; the others find its answer in the prompt cache.
    """
    ahead = [item for item in pending if not item.call.denoises]
    alike: dict[Hashable, list[Pending]] = defaultdict(list)
    asked: set[Hashable] = set()
    for item in ahead or pending:
        if item.prompt is None or item.prompt not in asked:
            asked.add(item.prompt)
            alike[item.call.component, item.call.method].append(item)
    return [InputBatch(group) for items in alike.values() for group in _groups(items, may_merge)]


def _groups(items: list[Pending], may_merge: MayMerge) -> list[list[Pending]]:
    """Group calls of one method of a component by what may be merged. A single call needs no key."""
    if len(items) == 1:
        return [items]
    groups: dict[Hashable, list[Pending]] = {}
    for position, item in enumerate(items):
        key = _key(item) if may_merge(item.call) else None
        groups.setdefault(("alone", position) if key is None else (key, item.state.batch_key, _verdict(item)), []).append(item)
    return list(groups.values())


def _key(item: Pending) -> Hashable | None:
    """Return the key of calls that may be merged with this one; None where none may, or where its arguments cannot be compared.

    A failed comparison follows from the kinds of the arguments, so it is the same on every rank. A lack of memory is not, and is raised.
    """
    if item.state.exact or item.state.whole:
        return None
    try:
        return group_key(item.call, item.state.contents)
    except Exception as error:
        require_usable_rank(error)
        if classify(error) is Fault.OUT_OF_MEMORY:
            raise
        log.debug("a call of %s shares no call, its arguments cannot be compared: %s", item.call.component, error)
        return None


def _verdict(item: Pending) -> CacheVerdict | None:
    return None if item.branch is None else item.branch.verdict
