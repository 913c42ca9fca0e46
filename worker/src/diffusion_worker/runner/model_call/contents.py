# SPDX-License-Identifier: Apache-2.0
"""Values compared by content, which is remembered: tables of positions are made once for a request and passed at every step."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from diffusion_worker.runner.families import cache_record

_PLAIN = (str, bytes, bool, int, float, complex, torch.dtype, torch.device)


# Two calls of a step for guidance, and two more for skipped layers.
MOST_REMEMBERED = 4


class _Known(NamedTuple):
    """A tensor, its version, a copy where it has none, and what was found of it."""

    tensor: torch.Tensor
    version: int | None
    copy: torch.Tensor | None
    found: Hashable


class Contents:
    """A memory of content hashes for one request, so that a tensor passed at every step is hashed once.

    It keeps the last few tensors of each argument. A known tensor is hashed again if its version shows a write. Inference mode leaves
    tensors without versions. On a CPU they are compared with a copy instead. On an accelerator they count as unwritten, because a
    comparison would make the host wait for the device. This is safe, since no pipeline overwrites an argument and passes it again.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[_Known]] = {}

    def of(self, path: str, value: Any) -> Hashable | None:
        """Return `content(value)`, which for a tensor is remembered under `path` until the tensor changes.

        None means that it cannot be compared.
        """
        return self._remembered(path, value, content) if isinstance(value, torch.Tensor) else content(value)

    def has_any(self, path: str, value: torch.Tensor) -> bool:
        """Return whether a tensor has a nonzero value."""
        return bool(self._remembered(f"any:{path}", value, lambda tensor: bool(tensor.any())))

    def _remembered(self, key: str, value: torch.Tensor, find: Callable[[torch.Tensor], Hashable]) -> Hashable:
        remembered = self._known.setdefault(key, [])
        for known in remembered:
            if known.tensor is value and known.version == _version(value) and (known.copy is None or torch.equal(known.copy, value)):
                return known.found
        found = find(value)
        copy = value.clone() if value.device.type == "cpu" and value.is_inference() else None
        others = [known for known in remembered if known.tensor is not value]
        self._known[key] = [*others[1 - MOST_REMEMBERED :], _Known(value, _version(value), copy, found)]
        return found


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version


def content(value: Any) -> Hashable | None:
    """Reduce a value to a key for comparison: SHA-256 with shape and dtype for arrays, item by item for containers.

    None means a part is of an unknown kind.
    """
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return tuple(value.shape), value.dtype, hashlib.sha256(data.data).digest()
    if isinstance(value, np.ndarray | np.generic):
        # The bytes of objects are addresses.
        if value.dtype.hasobject:
            return None
        return value.shape, value.dtype.str, hashlib.sha256(np.ascontiguousarray(value).data).digest()
    if value is None or isinstance(value, _PLAIN):
        return type(value).__name__, value
    if _is_idle(value):
        return type(value).__name__, "idle"
    if isinstance(value, list | tuple):
        items = tuple(content(item) for item in value)
        return None if any(item is None for item in items) else (type(value).__name__, items)
    if isinstance(value, dict):
        entries = tuple((key, content(item)) for key, item in value.items())
        return None if any(item is None for _, item in entries) else entries
    return None


def _is_idle(value: Any) -> bool:
    """Return whether a value is a cache on record that the model ignores, as the mode of every layer's cache in it is None."""
    record = cache_record(type(value))
    return record is not None and all(getattr(layer, record.mode) is None for layer in getattr(value, record.layers))
