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
    """The cache's state of one request for one sort of call, so that calls with and without the prompt do not mix."""

    verdict: CacheVerdict

    def begin(self) -> None:
        """Prepare for a call that is about to be made: set its verdict."""

    def decide(self, kept: Kept) -> CacheVerdict:
        """Return the verdict on a call that was open, by the values of its first layer; never open."""

    def recall(self, place: str) -> Tensors | None:
        """Return the remembered values of a place; None if there are none."""

    def keep(self, kept: Kept) -> None:
        """Store what the hooks left, by place. If the verdict is open, only the first layer has run, and its values serve the decision."""

    def held_bytes(self) -> int:
        """Return the size of the remembered values."""


class CachedRequest(Protocol):
    """A running request, as far as a step cache sees it."""

    spec: RequestSpec
    exact: bool
    whole: bool
    branches: dict[Hashable, Branch]

    def kind_of(self, call: ModelCall) -> Hashable:
        """Return the key of a call's branch, equal for the corresponding call of every step and different within one.

        The request counts its calls for this, so ask once a call.
        """


class CacheKind(Protocol):
    """A caching method with its settings: it judges and hooks denoisers, and makes the branches of requests."""

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Judge a denoiser before it is hooked: return the obstacle for an error message, or None."""

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        """Attach this method to a denoiser, once and at load; return the handle by which later calls switch the hooks on."""

    def branch(self, steps: int | None) -> Branch:
        """Make a branch for a request with this number of steps. With None, a method that needs the number takes diffusers' default."""


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the size of tensors, of which some may be missing."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def own_state(state: Any) -> StateManager:
    """Return a new manager of this class of state. A hook of diffusers needs it, even if it is on no module and only decides on skips."""
    states = StateManager(state)
    states.set_context(CacheContext("request"))
    return states
