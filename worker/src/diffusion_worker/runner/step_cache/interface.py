# SPDX-License-Identifier: Apache-2.0
"""The interface of a step cache: hooks on a denoiser's layers, and a request's remembered values."""

from collections.abc import Hashable
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
        """A call is about to be made: set the verdict on it."""

    def decide(self, kept: Kept) -> CacheVerdict:
        """The verdict on a call that was open, by what its first layer gave; never open."""

    def recall(self, place: str) -> Tensors | None:
        """Return the remembered values of a place; None if there are none."""

    def keep(self, kept: Kept) -> None:
        """The call was made (or its first layer, while the verdict is open)."""


class CachedRequest(Protocol):
    """A running request, as far as a step cache sees it."""

    spec: RequestSpec
    exact: bool
    whole: bool
    branches: dict[Hashable, Branch]

    def kind_of(self, call: ModelCall) -> Hashable:
        """Return what sets a call apart from the others of a step, and is the same at the next step."""


class CacheKind(Protocol):
    """A kind of step cache."""

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Return the reason why a denoiser cannot have this cache; None if it can."""

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        """Hook the layers of a denoiser."""

    def branch(self, steps: int | None) -> Branch:
        """A new one, of a request with so many steps."""


def own_state(state: Any) -> StateManager:
    """The state that one of diffusers' hooks asks for, for a hook that is asked for its rule and not put on a module."""
    states = StateManager(state)
    states.set_context(CacheContext("request"))
    return states
