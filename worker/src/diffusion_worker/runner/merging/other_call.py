# SPDX-License-Identifier: Apache-2.0
"""A call that may share one with another and differs from it in every argument that may differ."""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from diffusion_worker.runner.model_call.call import ModelCall, group_key

Path = tuple[Any, ...]
# A part of the standard normal distribution, added to values so that they stay in the range of a model.
NOISE = 0.5


def other_call(one: ModelCall, other: ModelCall) -> ModelCall:
    """Return a call with the key of `one`, made of the `other` request's call where that has the same key, else of `one` itself.

    Each tensor that is as in `one` is changed, unless the calls could not share one after that.
    """
    key = group_key(one)
    found = other if group_key(other) == key else one
    given = dict(leaves(one.arguments))
    for number, (path, value) in enumerate(list(leaves(found.arguments))):
        before = given.get(path)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor) and _equal(before, value):
            changed = msgspec.structs.replace(found, arguments=with_leaf(found.arguments, path, _changed(value, number)))
            found = changed if group_key(changed) == key else found
    return found


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value in nested dicts, lists and tuples, with its path of keys and indices; nothing for empty ones."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def cloned(value: Any) -> Any:
    """Copy nested plain dicts, lists and tuples with a copy of each tensor in them; other values are not copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: cloned(item) for key, item in value.items()}
    return type(value)(map(cloned, value)) if type(value) in (list, tuple) else value


def with_leaf(value: Any, path: Path, leaf: Any) -> Any:
    """Copy the containers along `path` and put `leaf` at its end; all else is shared with the original, which stays as it is."""
    if not path:
        return leaf
    if isinstance(value, dict):
        items = dict(value) | {path[0]: with_leaf(value[path[0]], path[1:], leaf)}
        return items if type(value) is dict else type(value)(**items)
    return type(value)(with_leaf(item, path[1:], leaf) if index == path[0] else item for index, item in enumerate(value))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _changed(value: torch.Tensor, number: int) -> torch.Tensor:
    """Return other values in the range of an argument, of the same shape and dtype; an empty or complex tensor is returned unchanged.

    Masks of two or more dimensions are flipped in their last entries. With fewer dimensions, positive values are halved and others grow by
    1. Otherwise integers move by 1, and floats get noise from a fixed seed.
    """
    if value.numel() == 0 or value.is_complex():
        return value
    if value.dim() > 1 and bool(((value == 0) | (value == 1)).all()):
        flipped = value.clone()
        flipped[..., -1] = 1 - value[..., -1].int()
        return flipped
    if value.dim() < 2:
        return torch.where(value > 0, (value / 2).to(value.dtype), value + 1)
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
        return value + NOISE * noise.to(value)
    return torch.where(value > 0, value - 1, value + 1)
