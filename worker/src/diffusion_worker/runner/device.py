# SPDX-License-Identifier: Apache-2.0
"""The device of a rank, and torch's reason where there is none."""

import torch

from diffusion_worker.config import Device
from diffusion_worker.errors import ConfigError


def device_of(wanted: Device, local_rank: int) -> torch.device:
    """Return the device for a rank. `auto` means the GPU with number `local_rank` if torch finds any GPU, else the CPU.

    Two ranks never share a GPU.

    Raises:
        ConfigError: `cuda` is wanted but torch finds no GPU, or there are too few GPUs for this rank.
    """
    if wanted is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted is Device.CUDA:
            raise ConfigError(f"--device cuda: expected a GPU that torch can use, found none: {why_no_accelerator()}")
        return torch.device("cpu")
    if local_rank >= (found := torch.cuda.device_count()):
        raise ConfigError(f"--ranks: rank {local_rank} has no GPU of its own, found {found}")
    return torch.device("cuda", local_rank)


def why_no_accelerator() -> str:
    """Return torch's reason for refusing an accelerator, for instance because its driver is missing or too old."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        # AssertionError: a build of torch for CPUs alone.
        return " ".join(str(error).split())
    return f"torch {torch.__version__} counts {torch.cuda.device_count()}"
