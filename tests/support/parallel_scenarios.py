# SPDX-License-Identifier: Apache-2.0
"""What the processes of the parallel tests run; one start of them for many families and kinds."""

from typing import Any

import torch

from parallel_families import BY_NAME, WITH_ADAPTER, Difference, apart, difference, run, with_heads
from rank_processes import Rank

SEQUENCE_FAMILIES = ["FluxPipeline", "Flux2Pipeline", "QwenImagePipeline", "WanPipeline", "LTXPipeline", "StableDiffusion3Pipeline"]
TENSOR_FAMILIES = ["FluxPipeline", "Flux2Pipeline", "QwenImagePipeline"]


def sequence(rank: Rank) -> dict[str, Difference]:
    """Every family with tokens over two ranks; what is left of the ranks are rows."""
    return {name: difference(rank, BY_NAME[name], sequence=2) for name in SEQUENCE_FAMILIES}


def tensor(rank: Rank) -> dict[str, Difference]:
    """Every family with layers over two ranks, without and with an adapter."""
    plain = {name: difference(rank, BY_NAME[name], tensor=2) for name in TENSOR_FAMILIES}
    return plain | {f"{name} adapted": difference(rank, BY_NAME[name], WITH_ADAPTER, tensor=2) for name in TENSOR_FAMILIES}


def four(rank: Rank) -> dict[str, Difference]:
    """Kinds over all four ranks, and two kinds at once."""
    found = {}
    for name in TENSOR_FAMILIES:
        wide = with_heads(BY_NAME[name], 4)
        found[f"{name} tensor 4"] = difference(rank, wide, WITH_ADAPTER, tensor=4)
        found[f"{name} sequence 4"] = difference(rank, wide, sequence=4) if name != "FluxPipeline" else found[f"{name} tensor 4"]
    found["QwenImagePipeline sequence 2 x shard 2"] = difference(rank, BY_NAME["QwenImagePipeline"], sequence=2, shard=2)
    return found
