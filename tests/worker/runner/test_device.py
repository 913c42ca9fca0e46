# SPDX-License-Identifier: Apache-2.0
"""A GPU that cannot be used is named at a rank's start. The GPU is the rehearsal's, and the errors are torch's, with CUDA's own words.

The words are those that `cudaGetErrorString` of CUDA 13 returns, without a driver as well.
"""

from collections.abc import Iterator

import pytest
import torch

from diffusion_worker.config import Device, Dtype, WorkerConfig
from diffusion_worker.errors import ConfigError, Fault
from diffusion_worker.runner.device import device_of, open_device
from diffusion_worker.runner.model_call.faults import RankFault
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA
from support.rehearsal.mode import Rehearsal

CONFIG = WorkerConfig(model="m", served_name="m")
HELP = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.fixture
def rehearsal() -> Iterator[Rehearsal]:
    with rehearse() as found:
        yield found


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "DeviceUnavailable", Fault.DEVICE),
        ("CUDA error: no kernel image is available for execution on the device", "DeviceUnavailable", Fault.DEVICE),
        ("CUDA error: uncorrectable ECC error encountered", "DeviceUnavailable", Fault.DEVICE),
        ("CUDA error: unknown error", "DeviceUnavailable", Fault.DEVICE),
        ("CUDA error: out of memory", "InsufficientMemory", Fault.OUT_OF_MEMORY),
    ],
    ids=["kept by another process", "too old for this torch", "faulty", "lost", "full"],
)
def test_a_gpu_that_refuses_to_work_ends_the_rank_with_its_own_words(rehearsal: Rehearsal, words: str, code: str, fault: Fault) -> None:
    def refuse(name: str) -> None:
        raise torch.AcceleratorError(words + HELP)

    rehearsal.before = refuse
    with pytest.raises(RankFault) as raised:
        open_device(CUDA, CONFIG)
    rehearsal.before = lambda name: None
    assert (raised.value.fault, str(raised.value)) == (fault, f"{code}: cuda:0 cannot be used: {words}")


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, "--dtype auto, which is bfloat16 on a GPU"),
        ({"dtype": Dtype.BFLOAT16}, "--dtype bfloat16"),
        ({"dtype": Dtype.FLOAT16, "component_dtypes": {"vae": Dtype.BFLOAT16}}, "--dtype bfloat16"),
    ],
    ids=["by default", "the model", "a component"],
)
def test_a_gpu_that_only_emulates_bfloat16_is_refused_by_its_name(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], asked: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    config = WorkerConfig(model="m", served_name="m", **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        open_device(CUDA, config)
    assert str(refused.value) == (
        f"DeviceUnavailable: {asked}: expected a GPU of compute capability 8.0 or later, found Tesla T4 with 7.5; choose float16 or float32"
    )
    open_device(CUDA, WorkerConfig(model="m", served_name="m", dtype=Dtype.FLOAT16))


def test_a_gpu_that_works_is_taken(rehearsal: Rehearsal) -> None:
    open_device(CUDA, CONFIG)


def test_a_rank_without_a_gpu_of_its_own_is_refused_as_with_a_mig_device(rehearsal: Rehearsal) -> None:
    assert device_of(Device.CUDA, 0) == CUDA
    with pytest.raises(ConfigError, match="--ranks: rank 1 has no GPU of its own, found 1"):
        device_of(Device.CUDA, 1)


@pytest.mark.parametrize(
    "words",
    [
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver.",
        "The NVIDIA driver on your system is too old (found version 12020).",
    ],
    ids=["absent", "driver too old"],
)
def test_a_gpu_that_is_asked_for_and_not_usable_is_refused_in_torchs_words(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def refuse() -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ConfigError) as refused:
        device_of(Device.CUDA, 0)
    assert str(refused.value) == f"DeviceUnavailable: --device cuda: expected a GPU that torch can use, found none: {words}"
