# SPDX-License-Identifier: Apache-2.0
"""Conversion of adapters by a function for whole checkpoints of a model, used if diffusers has none for adapters.

Such a function renames weights, splits their rows and swaps halves of them. All of that is right for the second factor of a LoRA
too, because it has the rows of its weight. So the function gets this factor in the weight's place; the first factor is the same
for all parts. A few rows stand in for weights that the adapter does not change, and are dropped afterwards.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from diffusion_worker.lora.formats import Part, take_apart

PREFIXES = ("lora_unet_", "diffusion_model.")
# Rows of a stand-in: projections are split in three, modulations in two.
STAND_IN_ROWS = 6


class PaddedSD3Checkpoint(dict[str, torch.Tensor]):
    """A mapping with an answer for any name: the adapter's factor, or zeros in place of a missing one.

    The conversion of Stable Diffusion 3 reads it.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], *, blocks: int, dual: tuple[int, ...]) -> None:
        """Present `weights`, given by names with underscores only, as a checkpoint.

        The conversion derives from names the number of blocks, and the blocks with a second attention: `blocks` and `dual`.
        """
        super().__init__()
        self._weights = weights
        self._last = f"joint_blocks.{blocks - 1}."
        self._dual = dict.fromkeys(f"joint_blocks.{block}.x_block.attn2." for block in dual)

    def __iter__(self) -> Iterator[str]:
        return iter([self._last])

    def keys(self) -> Any:
        """List a name for each block in `dual`, by which the conversion recognises a second attention. No other names are needed here."""
        return self._dual.keys()

    def __getitem__(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight").replace(".", "_")
        found = self._weights.get(module) if name.endswith(".weight") else None
        return torch.zeros(STAND_IN_ROWS, 1) if found is None else found

    def pop(self, name: str, *_: Any) -> torch.Tensor:
        """Return the factor of a name without removing it, or zeros if the adapter has none; a default is not used."""
        return self[name]


def convert_sd3(
    tensors: Mapping[str, torch.Tensor],
    convert: Callable[[PaddedSD3Checkpoint], Mapping[str, torch.Tensor]],
    *,
    blocks: int,
    dual: tuple[int, ...],
    source_of: Callable[[torch.Tensor], str | None],
) -> dict[str, torch.Tensor]:
    """Convert an adapter of Stable Diffusion 3 to diffusers' names, as pairs of factors of `transformer`.

    Factors that `convert` never reads are dropped. `source_of` finds the tensor from which `convert` made another, by name; it returns None
    for zeros that filled a gap.
    """
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    module_of: dict[str | None, str] = {}
    for name, tensor in tensors.items():
        taken = take_apart(name)
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if taken is not None and prefix is not None:
            module = module_of[name] = taken.module.removeprefix(prefix).replace(".", "_")
            {Part.A: first, Part.B: second}.get(taken.part, {})[module] = tensor
    found = {}
    for name, weight in convert(PaddedSD3Checkpoint(second, blocks=blocks, dual=dual)).items():
        owner = module_of.get(source_of(weight))
        if owner is not None:
            found[f"transformer.{name.removesuffix('.weight')}.lora_A.weight"] = first[owner]
            found[f"transformer.{name.removesuffix('.weight')}.lora_B.weight"] = weight
    return found
