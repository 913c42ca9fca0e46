# SPDX-License-Identifier: Apache-2.0
"""A rank's model as the process of a load knows it: its modules by name, and the shapes that an adapter's factors must have.

A rank reports it once, as plain data, so that an adapter can be checked and laid out for that rank without its model.
"""

import functools

import msgspec
import torch


class PartCut(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a layer that is cut by its outputs (`dim` 0) or by its inputs (`dim` 1).

    `blocks` are the sizes of consecutive blocks. Each is cut into `count` parts, and the rank has the part with number `index`.
    """

    dim: int
    blocks: tuple[int, ...]
    count: int
    index: int

    def of_a(self, a: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of A: the columns of the inputs that it has, or all of A."""
        return self.of(a, 1) if self.dim == 1 else a

    def of_b(self, b: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of B: the rows of the outputs that it has, or all of B."""
        return self.of(b, 0) if self.dim == 0 else b

    def of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's parts of all blocks along a dimension, joined. Blocks are layers that were fused, and are cut one by one."""
        parts = [block.chunk(self.count, dim)[self.index] for block in torch.split(whole, list(self.blocks), dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class TableLayer(msgspec.Struct, frozen=True, array_like=True):
    """A layer that adapters can change, with all of its names; the other fields are as in `ModelLayer`."""

    names: list[str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str
    cut: PartCut | None


class ConverterTable(msgspec.Struct, frozen=True, array_like=True):
    """The class whose `lora_state_dict` converts names of an original model, as `module:Class`, and what it needs of the model."""

    pipeline: str
    unet_config: dict[str, object] | None = None
    # For Stable Diffusion 3: the number of blocks, and those that have a second attention.
    blocks: int | None = None
    dual: tuple[int, ...] = ()


class ModelTable(msgspec.Struct, frozen=True, array_like=True):
    """The model of a rank. `modules` has the class of each module by `component.path`, `components` the class of each component.

    `targets` are the deployment's target modules. `slots` is 0 if adapters are off.
    """

    denoiser: str
    components: dict[str, str]
    modules: dict[str, str]
    layers: list[TableLayer]
    targets: list[str]
    slots: int
    max_rank: int
    converter: ConverterTable | None


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name such as `float16`; raises ValueError for any other name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected the name of a dtype of torch, found {name!r}")
    return found


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float16`."""
    return str(dtype).removeprefix("torch.")
