# SPDX-License-Identifier: Apache-2.0
"""Facts about the calls of a model's classes that only the calls themselves show, and that decide which requests may share one.

A fact follows from a failure that all ranks agreed on, or from a call that all of them made whole. So it is the same on every rank.
"""

from collections.abc import Hashable
from typing import Any

import torch

from diffusion_worker.recent import Recent
from diffusion_worker.runner.model_call.call import ModelCall

# Sizes of images are part of a kind, and requests choose them.
MOST_KINDS = 256
# Merged calls of a kind that fail in a row before it is not merged again. A single failure may be of the moment.
MOST_FAILURES = 2


class CallFacts:
    """The facts about the calls of one served model, by component, class and method."""

    def __init__(self) -> None:
        self._draws: set[Hashable] = set()
        self._same_adapters: set[Hashable] = set()
        self._failures: Recent[Hashable, int] = Recent(MOST_KINDS)

    def clear(self) -> None:
        """Forget all facts and counts, as for another model."""
        self._draws.clear()
        self._same_adapters.clear()
        self._failures.clear()

    def runs_alone(self, call: ModelCall) -> bool:
        """Return whether to make a call for one request at a time: it draws random numbers, or merging such calls failed twice in a row."""
        return self.draws(call) or self._failures_of(call) >= MOST_FAILURES

    def draws(self, call: ModelCall) -> bool:
        """Return whether calls of this method draw random numbers, which have to be those of one request."""
        return method_of(call) in self._draws

    def note_draws(self, call: ModelCall) -> None:
        """Remember that a call of this method drew from the global generators."""
        self._draws.add(method_of(call))

    def note_unmerged(self, call: ModelCall) -> None:
        """Count a failure of a merged call of this kind whose parts succeeded one by one.

        After `MOST_FAILURES` in a row calls of this kind run alone.
        """
        self._failures[kind_of(call)] = self._failures_of(call) + 1

    def note_merged(self, call: ModelCall) -> None:
        """Reset the count of failures for calls of this kind, because some were just made as one."""
        if self._failures:
            self._failures.pop(kind_of(call), None)

    def _failures_of(self, call: ModelCall) -> int:
        return self._failures.get(kind_of(call), 0) if self._failures else 0

    def needs_same_adapters(self, call: ModelCall) -> bool:
        """Return whether all rows of a call need the same adapters, because some layer does not see the rows."""
        return method_of(call) in self._same_adapters

    def note_same_adapters(self, call: ModelCall) -> None:
        """Remember that a layer that adapters change does not see the rows of this method's calls."""
        self._same_adapters.add(method_of(call))


def method_of(call: ModelCall) -> Hashable:
    """Return the component, class and method of a call."""
    return call.component, type(call.module), call.method


def kind_of(call: ModelCall) -> Hashable:
    """Return the method of a call, the size of its rows, and the names and kinds of its arguments.

    A class may fail to merge calls with one argument or of one size only.
    """
    return method_of(call), call.shape[1:], _argument_kind(call.arguments)


def _argument_kind(value: Any) -> str:
    """Return the kind of an argument as text: of a tensor its dtype and dimensions, of a container what its items are."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}[{value.dim()}]"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key}: {_argument_kind(item)}" for key, item in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(sorted(set(map(_argument_kind, value))))})"
    return type(value).__name__
