# SPDX-License-Identifier: Apache-2.0
"""The table of operations: those that wait for the device, those that take numbers of the host, and the cost of indices.

It follows torch's own test of `torch.cuda.set_sync_debug_mode`, and torch's sources of indexing and copying.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

# Operations whose result depends on values so much that the host has to see them.
WAITING = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::_linalg_check_errors"),
        *("aten::nonzero", "aten::masked_select", "aten::masked_scatter", "aten::masked_scatter_"),
        *("aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"),
        *("aten::bincount", "aten::multinomial", "aten::histc", "aten::allclose"),
    }
)
# Operations that take a single number of the host beside tensors of the device; the pointwise ones all do.
TAKES_NUMBERS = frozenset(
    {
        *("aten::copy_", "aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::full"),
        *("aten::_foreach_mul_", "aten::_foreach_mul", "aten::_foreach_div_", "aten::_foreach_div", "aten::_foreach_add_"),
        *("aten::searchsorted", "aten::isclose", "aten::lift_fresh"),
    }
)
INDEXING = frozenset(
    {
        *("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_"),
        *("aten::_index_put_impl_", "aten::_unsafe_index_put"),
    }
)
MASKS = (torch.bool, torch.uint8)


class Cost(NamedTuple):
    """The waits and copies of an operation, each with its name."""

    waits: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


def waits(name: str, kwargs: dict[str, Any], overload: str) -> bool:
    """Return whether the host waits for the device in an operation on its tensors. `overload` is the name of the operation's overload."""
    if name == "aten::repeat_interleave":
        return overload.startswith("Tensor") and kwargs.get("output_size") is None
    return name in WAITING


def takes_number(func: Any) -> bool:
    """Return whether an operation takes a single number of the host as a tensor beside those of the device."""
    return torch.Tag.pointwise in func.tags or func._schema.name in TAKES_NUMBERS


def cost_of_indices(indices: Iterable[tuple[torch.Tensor, bool]], value: tuple[torch.Tensor, bool] | None = None) -> Cost:
    """Return the waits and copies of indexing a tensor of the device. Each tensor comes with True if it is on the device.

    A mask of the device costs a wait. An index of the host costs a copy, and a wait too unless it is a mask. A single number of the host as
    `value` costs a copy and a wait. If all indices are masks of the device, neither such a number nor the masks cost anything.
    """
    found = list(indices)
    number = value is not None and not value[1] and value[0].dim() == 0
    if number and found and all(index.dtype in MASKS and there for index, there in found):
        return Cost()
    waits, copies = [], []
    for index, there in found:
        mask = index.dtype in MASKS
        if mask and there:
            waits.append("a mask as an index")
        elif not there:
            copies.append("an index of the host")
            if not mask:
                waits.append("an index of the host")
    if number:
        waits.append("a number to indexed places")
        copies.append("a number to indexed places")
    return Cost(tuple(waits), tuple(copies))
