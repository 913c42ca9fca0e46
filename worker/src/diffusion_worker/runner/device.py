# SPDX-License-Identifier: Apache-2.0
"""The device of a rank, and the reason why it cannot be used, in torch's words.

Messages about a device begin with a code, by which the operator tells them from those about the model.
"""

import torch

from diffusion_worker.config import Device, Dtype, WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, Fault
from diffusion_worker.runner.model_call.faults import RankFault, classify

DEVICE_UNAVAILABLE = "DeviceUnavailable"


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
            reason = why_no_accelerator()
            raise ConfigError(f"{DEVICE_UNAVAILABLE}: --device cuda: expected a GPU that torch can use, found none: {reason}")
        return torch.device("cpu")
    if local_rank >= (gpus := torch.cuda.device_count()):
        raise ConfigError(f"--ranks: rank {local_rank} has no GPU of its own, found {gpus} GPUs; ranks count from 0")
    return torch.device("cuda", local_rank)


def open_device(device: torch.device, config: WorkerConfig) -> None:
    """Select a rank's GPU and compute a number on it, so that a GPU that cannot be used is named before the model is read.

    Raises:
        ConfigError: the options want bfloat16, which the GPU only emulates. RankFault: the GPU refuses to work, for instance because it is
            full, lost, or kept by another process.
    """
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        full = classify(error) is Fault.OUT_OF_MEMORY
        fault, code = (Fault.OUT_OF_MEMORY, ErrorCode.INSUFFICIENT_MEMORY) if full else (Fault.DEVICE, DEVICE_UNAVAILABLE)
        # The first line is the device's; those behind it explain how to debug.
        reason = str(error).partition("\n")[0]
        raise RankFault(fault, f"{code}: {device} cannot be used: {reason}") from error
    if Dtype.BFLOAT16 in (config.dtype, *config.component_dtypes.values()) or config.dtype is Dtype.AUTO:
        _require_bfloat16(device, config.dtype)


def why_no_accelerator() -> str:
    """Return torch's reason for refusing an accelerator, for instance because its driver is missing or too old.

    If torch refuses none, return its version and the number of GPUs that it counts.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        # AssertionError: a build of torch for CPUs alone.
        return " ".join(str(error).split())
    version, gpus = torch.__version__, torch.cuda.device_count()
    return f"torch {version} counts {gpus} GPUs"


def _require_bfloat16(device: torch.device, dtype: Dtype) -> None:
    # Older GPUs emulate it, slower than float32, and some kernels are missing.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return
    major, minor = torch.cuda.get_device_capability(device)
    asked = "--dtype auto, which is bfloat16 on a GPU" if dtype is Dtype.AUTO else "--dtype bfloat16"
    gpu = torch.cuda.get_device_name(device)
    raise ConfigError(
        f"{DEVICE_UNAVAILABLE}: {asked}: expected a GPU of compute capability 8.0 or later, found {gpu} "
        f"with {major}.{minor}; choose float16 or float32"
    )
