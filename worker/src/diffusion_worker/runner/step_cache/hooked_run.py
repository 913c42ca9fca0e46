# SPDX-License-Identifier: Apache-2.0
"""State shared by a step cache and its hooks while a module runs for some rows of some requests.

The hooks keep nothing of their own. They get remembered values by place (the name of a layer), and leave values to remember in
`CachedRun.kept`. So rows may be computed on any rank, beside any others.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Some tensors that belong together, each with a row (or several) for each row of the call; None stands for a missing one.
Tensors = list[torch.Tensor | None]
Kept = dict[str, Tensors]
# A function that is called with a layer's own forward and the arguments of the layer's call.
Around = Callable[..., Any]


class CacheVerdict(enum.Enum):
    """The decision for a call's layers: compute all, skip most, or compute the first one to decide."""

    COMPUTE = "compute"
    SKIP = "skip"
    OPEN = "open"


class FirstBlockOnly(Exception):
    """Raised out of a module after its first layer, when only that was wanted. The code that runs the module handles it."""


class CachedRun:
    """A pass through a hooked module, as its hooks see it: a verdict, and in `kept` the values to remember.

    `recall` looks up earlier values of the same rows by place, None if there are none. A hook with an open verdict asks `decide`, which may
    return open again.
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
        """Let the hooks follow `run` in this context."""
        self.run = run
        try:
            yield
        finally:
            self.run = None


def hook(layer: torch.nn.Module, around: Around) -> None:
    """Replace a layer's calls by `around(forward, *args, **kwargs)`, where `forward` makes the former call, compiled or not.

    The hook stays outside of compiled code: if it raises, or acts by its run, it would break the layer's graph.
    """
    layer._compiled_call_impl = functools.partial(around, layer._compiled_call_impl or layer._call_impl)
