# SPDX-License-Identifier: Apache-2.0
"""The decision between spawn and the fork server, the check at a rank's start, and the device of an option."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from diffusion_worker.config import Device, StartMethod, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.ranks.start_check import require_usable_process
from diffusion_worker.ranks.start_method import accelerator_node, start_method_of
from diffusion_worker.runner.device import device_of

AUTO, SPAWN, FORKSERVER = StartMethod.AUTO, StartMethod.SPAWN, StartMethod.FORKSERVER


@pytest.fixture
def driver(tmp_path: Path) -> Sequence[Path]:
    """Provide the paths of two drivers' files, of which only the second exists."""
    (tmp_path / "kfd").touch()
    return tmp_path / "nvidiactl", tmp_path / "kfd"


def decided(device: Device, method: StartMethod, nodes: Sequence[Path]) -> StartMethod:
    return start_method_of(WorkerConfig(model="m", served_name="m", device=device, start_method=method), nodes)


def test_ranks_are_spawned_where_a_driver_is_or_a_gpu_is_asked_for_and_come_from_the_fork_server_on_a_cpu(driver: Sequence[Path]) -> None:
    assert accelerator_node(driver) == driver[1]
    assert [decided(device, AUTO, driver) for device in Device] == [SPAWN, SPAWN, FORKSERVER]
    assert [decided(device, AUTO, driver[:1]) for device in Device] == [FORKSERVER, SPAWN, FORKSERVER]


@pytest.mark.parametrize("method", [SPAWN, FORKSERVER])
@pytest.mark.parametrize("device", Device)
def test_the_option_overrides_what_would_be_decided(method: StartMethod, device: Device, driver: Sequence[Path]) -> None:
    assert {decided(device, method, driver), decided(device, method, ())} == {method}


@pytest.mark.parametrize(
    ("method", "accelerator", "bad_fork", "refused"),
    [
        (FORKSERVER, False, True, False),  # all ranks are on a CPU, and diffusers asked for a GPU in the fork server
        (FORKSERVER, True, False, False),
        (FORKSERVER, True, True, True),
        (SPAWN, True, False, False),
        (SPAWN, True, True, True),
        (SPAWN, False, True, True),
        (SPAWN, False, False, False),
    ],
)
def test_a_process_that_cannot_use_its_gpu_is_refused_with_the_cause_and_the_way_out(
    method: StartMethod, accelerator: bool, bad_fork: bool, refused: bool
) -> None:
    if not refused:
        require_usable_process(method, accelerator=accelerator, bad_fork=bad_fork)
        return
    with pytest.raises(ConfigError) as error:
        require_usable_process(method, accelerator=accelerator, bad_fork=bad_fork)
    said = str(error.value)
    assert said.startswith(f"--start-method {method}: this rank cannot use a GPU")
    assert "had already asked torch for one" in said and "Use --start-method spawn, or --device cpu" in said


def test_a_rank_told_to_use_the_cpu_does() -> None:
    assert device_of(Device.CPU, 3) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused_in_torchs_own_words() -> None:
    assert device_of(Device.AUTO, 0) == torch.device("cpu")
    with pytest.raises((AssertionError, RuntimeError)) as own:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError) as error:
        device_of(Device.CUDA, 0)
    assert str(error.value) == f"DeviceUnavailable: --device cuda: expected a GPU that torch can use, found none: {own.value}"
