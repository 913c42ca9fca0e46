# SPDX-License-Identifier: Apache-2.0
"""Outputs of a module: tensors in tuples, lists, dicts and diffusers' distributions, split by rows."""

import itertools
from collections.abc import Callable
from typing import Any

import torch


def split(output: Any, rows: list[int]) -> list[Any]:
    """Return each call's share of a merged output; `rows` has the calls' row counts, in order. With a single call it is the output itself.

    Raises:
        TypeError: a tensor's length is no multiple of the total, or an object of an unknown kind is in it.
    """
    if len(rows) == 1:
        return [output]
    ends = list(itertools.accumulate(rows))
    return [_part(output, end - count, end, ends[-1]) for count, end in zip(rows, ends, strict=True)]


def _part(output: Any, start: int, stop: int, total: int) -> Any:
    if isinstance(output, torch.Tensor):
        if output.dim() == 0 or output.shape[0] % total:
            raise TypeError(f"a model's output of shape {tuple(output.shape)} cannot be split by {total} rows")
        each = output.shape[0] // total
        return output[start * each : stop * each]
    return _rebuilt(output, lambda item: _part(item, start, stop, total))


def _rebuilt(output: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same output with each of its parts changed; raise TypeError for a kind that cannot be made again."""
    if output is None:
        return None
    if isinstance(output, dict):
        items = {key: change(value) for key, value in output.items()}
        # diffusers' BaseOutput and transformers' ModelOutput are dicts that take their items by name.
        return items if type(output) is dict else type(output)(**items)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(change, output))
    if isinstance(output, list | tuple):
        return type(output)(map(change, output))
    if _is_distribution(output):
        # A distribution is made again from its parameters: its other tensors are slices of them, bit for bit.
        return type(output)(change(output.parameters), deterministic=output.deterministic)
    raise TypeError(f"a model's output of type {type(output).__name__} cannot be split by rows")


def _is_distribution(output: Any) -> bool:
    """Return whether an output is one of the distributions of diffusers' VAEs, which have no class in common."""
    return isinstance(getattr(output, "parameters", None), torch.Tensor) and hasattr(output, "deterministic")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Collect all tensors in an output, depth first; a distribution has only its parameters. `with_tensors` expects the same order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if _is_distribution(output):
        return [output.parameters]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def with_tensors(output: Any, tensors: list[torch.Tensor]) -> Any:
    """Rebuild an output around replacements for its tensors, ordered as `tensors_of` lists them. Each one used is popped from `tensors`."""
    if isinstance(output, torch.Tensor):
        return tensors.pop(0)
    if isinstance(output, dict | list | tuple) or _is_distribution(output):
        return _rebuilt(output, lambda item: with_tensors(item, tensors))
    return output


class _Items(list[torch.Tensor]):
    """The list that `stacked` puts in the place of another: its only item is the tensor [rows, ...]. The type lets `unstacked` find it."""


def stacked(output: Any) -> Any:
    """Replace lists of equally shaped tensors by `_Items`, at any depth in dicts, lists and tuples.

    Functions that cut by rows then see tensors.
    """
    if type(output) is list and output and all(isinstance(item, torch.Tensor) for item in output):
        return _Items([torch.stack(output)])
    return _rebuilt(output, stacked) if isinstance(output, dict | list | tuple) else output


def unstacked(output: Any) -> Any:
    """Return the same output with lists again in place of the tensors that `stacked` made of them."""
    if isinstance(output, _Items):
        return list(output[0])
    return _rebuilt(output, unstacked) if isinstance(output, dict | list | tuple) else output


def is_plain(output: Any) -> bool:
    """Return whether an output consists only of tensors and None, in dicts, lists and tuples, so that copying the tensors copies it."""
    if isinstance(output, dict):
        return all(map(is_plain, output.values()))
    if isinstance(output, list | tuple):
        return all(map(is_plain, output))
    return output is None or isinstance(output, torch.Tensor)
