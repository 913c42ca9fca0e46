# SPDX-License-Identifier: Apache-2.0
"""Checks at the start of a rank that its process can use its device, before anything is loaded."""

import logging
from pathlib import Path

import torch

from diffusion_worker.config import Device, StartMethod
from diffusion_worker.errors import ConfigError
from diffusion_worker.ranks.start_method import accelerator_node
from diffusion_worker.runner.device import device_of, why_no_accelerator

log = logging.getLogger(__name__)


def check_start(wanted: Device, rank: int, method: StartMethod) -> None:
    """Check that this process can use the device that is asked for; log the device and how the process was started.

    Raises:
        ConfigError: the device that is asked for is not there, or this process cannot use it.
    """
    bad_fork, node = torch.cuda._is_in_bad_fork(), accelerator_node()
    accelerator = wanted is Device.CUDA or (wanted is Device.AUTO and (node is not None or torch.cuda.is_available()))
    require_usable_process(method, accelerator=accelerator, bad_fork=bad_fork)
    device = device_of(wanted, rank)
    log.info("rank starts start_method=%s device=%s", method, device)
    _warn_of_unused(node, wanted, device)


def require_usable_process(method: StartMethod, *, accelerator: bool, bad_fork: bool) -> None:
    """Raise ConfigError for a process that cannot use an accelerator because its parent asked for one.

    `bad_fork` is set in a forked rank on a CPU as well, where it does no harm. A spawned rank has no such parent, so there it is a defect.
    """
    if not bad_fork or not (accelerator or method is StartMethod.SPAWN):
        return
    raise ConfigError(
        f"--start-method {method}: this rank cannot use a GPU, because the process that it was forked from had already asked torch "
        "for one. Importing diffusers is enough to ask. Use --start-method spawn, or --device cpu to serve without a GPU"
    )


def require_untouched_device() -> None:
    """Raise RuntimeError unless this process may still become any rank: not forked from one that asked for a GPU, and without CUDA."""
    bad_fork, initialised = torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if bad_fork or initialised:
        raise RuntimeError(
            f"imports of a standby: expected a process that may start CUDA and has not, found bad_fork={bad_fork} initialised={initialised}"
        )


def _warn_of_unused(node: Path | None, wanted: Device, device: torch.device) -> None:
    """Log a warning if this rank computes on the CPU by `--device auto`, although there is a GPU, which torch cannot use then."""
    if node is not None and wanted is Device.AUTO and device.type == "cpu":
        log.warning("this rank computes on the CPU although %s is there: %s", node, why_no_accelerator())
