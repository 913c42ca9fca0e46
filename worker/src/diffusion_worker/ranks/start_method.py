# SPDX-License-Identifier: Apache-2.0
"""The choice between the ways to start rank processes, made in the server, which imports no torch and so cannot ask torch.

A forked process cannot use an accelerator once its parent asked for one. Importing diffusers is enough to ask: it calls
`torch.accelerator.is_available()`. So the fork server, which imports diffusers, is for CPUs only.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion_worker.config import Device, StartMethod, WorkerConfig

# Files of NVIDIA's and AMD's drivers. A container has them only where a device was given to it.
ACCELERATOR_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def accelerator_node(nodes: Sequence[Path] = ACCELERATOR_NODES) -> Path | None:
    """Find the file of an accelerator's driver; None where there is none."""
    return next((node for node in nodes if node.exists()), None)


def start_method_of(config: WorkerConfig, nodes: Sequence[Path] = ACCELERATOR_NODES) -> StartMethod:
    """Choose `SPAWN` or `FORKSERVER`: by the option if it is set, otherwise `SPAWN` where a GPU is asked for or seems to be there."""
    if config.start_method is not StartMethod.AUTO:
        return config.start_method
    return StartMethod.SPAWN if accelerator_expected(config, nodes) else StartMethod.FORKSERVER


def accelerator_expected(config: WorkerConfig, nodes: Sequence[Path] = ACCELERATOR_NODES) -> bool:
    """Return whether a GPU is asked for or seems to be there."""
    return config.device is Device.CUDA or (config.device is Device.AUTO and accelerator_node(nodes) is not None)
