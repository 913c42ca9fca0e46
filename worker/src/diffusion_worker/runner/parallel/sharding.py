# SPDX-License-Identifier: Apache-2.0
"""Sharded weights (HSDP): each rank keeps a part of every weight, and a block's weights are gathered while it computes.

It is for models that are too large for one card and have no plan for another kind: it needs no knowledge of the model. It saves memory;
rows are still spread over these ranks, so that they do not all compute the same.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.families import model_record

# Words in the names of components that are sharded. A VAE is not: it is small, and its `decode` bypasses the hooks.
SHARDED = ("transformer", "unet", "controlnet", "prior", "text_encoder")


def is_sharded(component: str) -> bool:
    """Return whether --shard applies to a component, which depends on its name alone: it contains a word of `SHARDED`."""
    return any(word in component for word in SHARDED)


def check_model(component: str, model: nn.Module) -> None:
    """Raise ConfigError if the record of the model's class has a reason against sharding, and quote it."""
    if why := model_record(type(model)).unsharded:
        raise ConfigError(f"--shard: {type(model).__name__} ({component}) is not supported: {why}")


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the weights: block by block, then those in no block. `mesh` is the shard dimension."""
    own = type(model)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    # Without this the weights of the root would stay whole after the first call.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # The model has another class now. Knowledge of models, including the roles of arguments, is found by the name of their class.
    made: Any = type(model)
    made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's repeated blocks, each once: entries of outermost ModuleLists that have parameters.

    An entry that is itself a list or a dict is not called, so its members are searched in its place.
    """
    seen: set[int] = set()
    for child in model.children():
        for block in _entries(child) if isinstance(child, nn.ModuleList) else blocks_of(child):
            if id(block) not in seen:
                seen.add(id(block))
                yield block


def _entries(blocks: nn.ModuleList) -> Iterator[nn.Module]:
    for entry in blocks:
        if isinstance(entry, nn.ModuleList | nn.ModuleDict):
            yield from blocks_of(entry)
        elif any(True for _ in entry.parameters()):
            yield entry
