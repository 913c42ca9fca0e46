# SPDX-License-Identifier: Apache-2.0
"""The step cache of a worker: its denoisers, and merged calls for requests that each remember their own values.

A call of several requests is made once if all of them skip or all compute. If only the first block can decide, it is computed for all of
them together. If they then differ, those that skip and those that compute continue in separate calls, from the first block's output. Values
to remember leave a call with its rows, like the model's own output. So every rank has every request's, wherever its rows are computed next.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.outputs import split
from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CachedRun, CacheVerdict, FirstBlockOnly, Kept, Tensors
from diffusion_worker.runner.step_cache.interface import Branch, CachedRequest, CacheKind

# Returns the verdicts that all ranks share, from this rank's verdicts on the same requests.
Agree = Callable[[list[CacheVerdict]], list[CacheVerdict]]


class MixedVerdicts(Exception):
    """Raised when some requests of a call turn out to skip and others to compute: each group then needs a call of its own."""


class PipelineStepCache:
    """A caching method, hooked onto each denoiser of a pipeline when this is constructed; the branches belong to requests.

    `agree` turns the verdicts of one rank into those of all. A single rank passes None, and decides while the module runs.
    """

    def __init__(self, kind: CacheKind, denoisers: dict[str, torch.nn.Module], agree: Agree | None) -> None:
        self.kind = kind
        self._modules = {name: kind.put_on(module) for name, module in denoisers.items()}
        self._agree = agree

    def branch_of(self, state: CachedRequest, call: ModelCall) -> Branch | None:
        """Begin the next call of a request's branch and return the branch; return None for a call without the cache."""
        if not state.spec.accelerated or state.exact or state.whole or call.component not in self._modules or call.method != "forward":
            return None
        kind = state.kind_of(call)
        branch = state.branches.get(kind)
        if branch is None:
            branch = state.branches[kind] = self.kind.branch(state.spec.steps)
        branch.begin()
        return branch

    def plan(self, component: str, branches: list[Branch], rows: list[int]) -> "Plan":
        """Plan a joint call for the requests of these branches, which have the same verdict; `rows` has the rows of each."""
        return Plan(self._modules[component], branches, rows, self._agree)


class Plan:
    """The plan of a cached module's call. After the call `skips` says whether blocks were skipped."""

    def __init__(self, module: CachedModule, branches: list[Branch], rows: list[int], agree: Agree | None) -> None:
        self._module = module
        self._branches = branches
        self._rows = rows
        self._agree = agree
        self._verdict = branches[0].verdict
        # The verdicts of the branches that differ, since the rule waits for the device each time it is asked.
        self._differing: list[CacheVerdict] = []

    @property
    def skips(self) -> bool:
        return self._verdict is CacheVerdict.SKIP

    def execute(self, make: Callable[[], Any], rows: slice) -> tuple[Any, Kept]:
        """Run `make`, which calls the module for some rows, with the hooks on; return its output and the values kept by place.

        The output is None if the hooks stopped it after the first block, because verdicts are still open.
        """
        run = CachedRun(self._verdict, lambda place: self._recall(place, rows), self._decide)
        output = None
        with self._module.running(run), contextlib.suppress(FirstBlockOnly):
            output = make()
        self._verdict = run.verdict
        return output, run.kept

    def keep(self, made: list[tuple[Any, Kept]]) -> list[Any]:
        """Let each request remember its part of the call's values; return the parts of the output.

        Raises:
            MixedVerdicts: the requests differ, and each has its own verdict now.
        """
        for branch, (_, kept) in zip(self._branches, made, strict=True):
            if self._verdict is not CacheVerdict.OPEN:
                branch.verdict = self._verdict
            branch.keep({place: [_own(tensor) for tensor in tensors] for place, tensors in kept.items()})
        if self._verdict is not CacheVerdict.OPEN:
            return [output for output, _ in made]
        verdicts = self._differing or [branch.decide(kept) for branch, (_, kept) in zip(self._branches, made, strict=True)]
        for branch, verdict in zip(self._branches, self._agree(verdicts) if self._agree else verdicts, strict=True):
            branch.verdict = verdict
        raise MixedVerdicts

    def _decide(self, kept: Kept) -> CacheVerdict:
        """Return the verdict of all requests if they agree, otherwise open. With several ranks it is always open inside the call."""
        if self._agree is not None:
            return CacheVerdict.OPEN
        verdicts = [branch.decide(part) for branch, part in zip(self._branches, split(kept, self._rows), strict=True)]
        if len(set(verdicts)) == 1:
            return verdicts[0]
        self._differing = verdicts
        return CacheVerdict.OPEN

    def _recall(self, place: str, rows: slice) -> Tensors | None:
        """Return the requests' remembered values of a place, concatenated and cut to some rows of the call."""
        found = [known for branch in self._branches if (known := branch.recall(place)) is not None]
        if not found:
            return None
        return [_rows_of(list(column), rows, sum(self._rows)) for column in zip(*found, strict=True)]


def _rows_of(tensors: list[torch.Tensor | None], rows: slice, total: int) -> torch.Tensor | None:
    if any(tensor is None for tensor in tensors):
        return None
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # type: ignore[arg-type]
    assert whole is not None
    each = whole.shape[0] // total
    return whole[rows.start * each : rows.stop * each]


def _own(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor that keeps no other request's rows in memory: the same, or a copy."""
    if tensor is None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
