# SPDX-License-Identifier: Apache-2.0
"""The interface of a step cache: hooks on a denoiser's layers, and a request's remembered values."""

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch
from diffusers.hooks.hooks import CacheContext, StateManager

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CacheVerdict, Kept, Tensors


class Branch(Protocol):
    """A request's remembered values for one kind of its calls: those with its prompt, or those without."""

    verdict: CacheVerdict

    def begin(self) -> None:
        """Prepare for a call that is about to be made: set its verdict."""

    def decide(self, kept: Kept) -> CacheVerdict:
        """Return the verdict on a call that was open, by the values of its first layer; never open."""

    def recall(self, place: str) -> Tensors | None:
        """Return the remembered values of a place; None if there are none."""

    def keep(self, kept: Kept) -> None:
        """Remember the values of a call that was made, or of its first layer while the verdict is open."""

    def held_bytes(self) -> int:
        """Return the size of the remembered values."""


class CachedRequest(Protocol):
    """A running request, as far as a step cache sees it."""

    spec: RequestSpec
    exact: bool
    whole: bool
    branches: dict[Hashable, Branch]

    def kind_of(self, call: ModelCall) -> Hashable:
        """Return a key that sets a call apart from the others of a step, and is the same at the next step."""


class CacheKind(Protocol):
    """A kind of step cache."""

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Return the reason why a denoiser cannot have this cache; None if it can."""

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        """Put the cache's hooks on the layers of a denoiser."""

    def branch(self, steps: int | None) -> Branch:
        """Make a branch for a request with this number of steps."""


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the size of tensors, of which some may be missing."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def own_state(state: Any) -> StateManager:
    """Return a new manager of this class of state. A hook of diffusers needs it, even if it is on no module and only decides on skips."""
    states = StateManager(state)
    states.set_context(CacheContext("request"))
    return states
