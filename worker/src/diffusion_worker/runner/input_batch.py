# SPDX-License-Identifier: Apache-2.0
"""Pending calls of many requests, arranged into calls of the real modules."""

from collections.abc import Hashable

import msgspec

from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.calls import ModelCall, group_key, merge
from diffusion_worker.runner.request_state import DiffusionRequestState

Pending = tuple[DiffusionRequestState, ModelCall]


class InputBatch(msgspec.Struct, frozen=True):
    """One call of a module for several requests: `rows[i]` rows belong to `states[i]`."""

    states: list[DiffusionRequestState]
    calls: list[ModelCall]

    @property
    def rows(self) -> list[int]:
        """Rows of each request."""
        return [call.rows for call in self.calls]

    @property
    def loras(self) -> list[LoRAUse | None]:
        """The adapter of each row."""
        return [state.spec.lora for state, count in zip(self.states, self.rows, strict=True) for _ in range(count)]

    def merged(self) -> ModelCall:
        """The one call to make."""
        return merge(self.calls)

    def alone(self) -> list["InputBatch"]:
        """The same calls, each by itself."""
        return [InputBatch([state], [call]) for state, call in zip(self.states, self.calls, strict=True)]


def make_batches(pending: list[Pending]) -> list[InputBatch]:
    """Group the calls that may run now, in the order of their requests, which is the same on every rank.

    Calls outside a step (encoders, VAE) go first and keep steps waiting: a request that joins is brought up to its first
    step before the others take theirs, so that they share it.
    """
    ahead = [item for item in pending if not item[1].denoises]
    groups: dict[Hashable, list[Pending]] = {}
    for position, (state, call) in enumerate(ahead or pending):
        key = group_key(call)
        groups.setdefault(("alone", position) if key is None else key, []).append((state, call))
    return [InputBatch([state for state, _ in group], [call for _, call in group]) for group in groups.values()]
