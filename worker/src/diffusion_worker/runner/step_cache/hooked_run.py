# SPDX-License-Identifier: Apache-2.0
"""State shared by a step cache and its hooks while a module runs for some rows of some requests.

The hooks keep nothing of their own. They get what is remembered by place (the name of a layer), and leave what is to be
remembered in `CachedRun.kept`. So rows may be computed on any rank, in any company.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Some tensors that belong together, each with a row (or several) for each row of the call; None stands for one there is not.
Tensors = list[torch.Tensor | None]
Kept = dict[str, Tensors]
# A layer's own forward, and what it was called with.
Around = Callable[..., Any]


class CacheVerdict(enum.Enum):
    """The decision for a call's layers: compute all, skip most, or compute the first one to decide."""

    COMPUTE = "compute"
    SKIP = "skip"
    OPEN = "open"


class FirstBlockOnly(Exception):
    """Raised out of a module whose first layer is computed, when that is all that was wanted; handled by who ran it."""


class CachedRun:
    """An execution of a module. `recall` gives what is remembered of a place, for the rows of this execution.

    `decide` turns an open verdict into another one from what was kept so far, or leaves it open.
    """

    def __init__(self, verdict: CacheVerdict, recall: Callable[[str], Tensors | None], decide: Callable[[Kept], CacheVerdict]) -> None:
        self.verdict = verdict
        self.recall = recall
        self.decide = decide
        self.kept: Kept = {}
        # Values that a hook leaves for a later one of the same execution.
        self.passed: Tensors = []


class CachedModule:
    """A denoiser with hooks on its layers, which do nothing unless `run` is set."""

    def __init__(self) -> None:
        self.run: CachedRun | None = None

    @contextlib.contextmanager
    def running(self, run: CachedRun) -> Iterator[None]:
        """Let the hooks go by `run`."""
        self.run = run
        try:
            yield
        finally:
            self.run = None


def hook(layer: torch.nn.Module, around: Around) -> None:
    """From now on calls of a layer go to `around(forward, *args, **kwargs)`; `forward` is what they were before, compiled or not.

    Outside of what is compiled: a hook that raises, or whose way depends on its run, would break the layer's graph.
    """
    layer._compiled_call_impl = functools.partial(around, layer._compiled_call_impl or layer._call_impl)
