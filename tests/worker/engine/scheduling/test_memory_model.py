# SPDX-License-Identifier: Apache-2.0
"""Admission by memory: requests that cannot fit are refused before they run, and no other ones."""

import math
from pathlib import Path

import pytest
import torch

from diffusion_worker.engine.requests.admission import GenerationParams, check_memory
from diffusion_worker.engine.scheduling.memory_model import FORGET_S, MemoryModel
from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.memory.device_memory import free_bytes
from diffusion_worker.memory.host_memory import machine_bytes
from diffusion_worker.messages import ModelInfo

MIB = 2**20
MODEL = ModelInfo(pipeline="P", dtype="float32", size_multiple=8, weights_bytes=1, default_height=512, default_width=512)


def square(side: int) -> RequestClass:
    return RequestClass(side, side, None, guided=False, exact=False)


def measured() -> MemoryModel:
    """Return the model of a device of 1000 MiB whose steps were measured at 100 MiB and 1 MiB for each 1,024 pixels."""
    memory = MemoryModel(1000 * MIB)
    for side in (128, 256, 512):
        memory.observe(square(side), 1, 100 * MIB + side * side * 1024)
    return memory


def test_an_image_larger_than_what_fits_in_memory_is_refused_with_its_size_and_what_fits() -> None:
    most = measured().most_load(0.0)
    check_memory(GenerationParams(prompt="p kumquatfen", width=960, height=960, guidance_scale=1.0), MODEL, most)
    with pytest.raises(
        RequestError, match=r"size: expected at most 9216\d\d pixels, which is what fits in memory, found 1024x1024"
    ) as refused:
        check_memory(GenerationParams(prompt="p kumquatfen", width=1024, height=1024, guidance_scale=1.0), MODEL, most)
    assert (refused.value.code, refused.value.status, refused.value.details) == (ErrorCode.INVALID_REQUEST, 400, {"field": "size"})


def test_guidance_doubles_what_an_image_needs() -> None:
    with pytest.raises(RequestError, match="960x960"):
        check_memory(GenerationParams(prompt="p kumquatfen", width=960, height=960, guidance_scale=5.0), MODEL, measured().most_load(0.0))


def test_nothing_is_refused_where_memory_is_not_known_or_was_measured_at_one_size_only() -> None:
    assert math.isinf(MemoryModel().most_load(0.0))
    once = MemoryModel(1000 * MIB)
    once.observe(square(64), 1, 900 * MIB)  # most of it may be needed at every size
    check_memory(GenerationParams(prompt="p kumquatfen", width=2048, height=2048), MODEL, once.most_load(0.0))


def test_an_image_whose_pixels_alone_are_larger_than_the_device_is_refused_before_anything_was_measured() -> None:
    with pytest.raises(RequestError, match="found 8192x8192"):
        check_memory(GenerationParams(prompt="p kumquatfen", width=8192, height=8192), MODEL, MemoryModel(500 * MIB).most_load(0.0))


def test_what_was_out_of_memory_alone_is_refused_for_a_while() -> None:
    memory = MemoryModel()
    memory.failed(square(1024).load, now_s=100.0)
    assert square(1024).load > memory.most_load(101.0) > square(1016).load
    assert math.isinf(memory.most_load(100.0 + FORGET_S))


def test_the_batch_of_a_class_is_as_large_as_its_own_peaks_let_it_be_and_never_empty() -> None:
    memory = MemoryModel(1000 * MIB)
    for side, each in ((256, 64), (512, 256), (1024, 1024)):
        memory.observe(square(side), 1, (100 + each) * MIB)
        assert memory.batch(square(side), 8) == 8  # a single point gives no line
    memory.observe(square(512), 2, (100 + 2 * 256) * MIB)
    memory.observe(square(256), 4, (100 + 4 * 64) * MIB)
    assert [memory.batch(square(side), 16) for side in (256, 512)] == [14, 3]
    memory.observe(square(1024), 2, (100 + 2 * 1024) * MIB)  # more than the device has: a wrong measurement, as the step succeeded
    assert memory.batch(square(1024), 8) == 2


def test_a_peak_that_decoding_made_counts_for_the_size_of_the_image() -> None:
    memory = measured()
    before = memory.most_load(0.0)
    memory.observe(square(512), 1, 900 * MIB)  # the last tick of a request denoises nothing
    assert square(512).load < memory.most_load(0.0) < before


def test_many_measured_sizes_give_the_line_of_their_smallest_and_largest() -> None:
    memory = MemoryModel(10_000 * MIB)
    for side in range(8, 8 * 200, 8):
        memory.observe(square(side), 1, 100 * MIB + side * side * 1024)
    assert memory.most_load(0.0) == pytest.approx(9_900 * 1024, rel=1e-6)


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_rank_on_the_cpu_has_its_part_of_what_the_cgroup_allows_beside_its_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{400 * MIB}\n")
    assert free_bytes(torch.device("cpu"), ranks=2, weights_bytes=50 * MIB, cgroup=tmp_path) == 150 * MIB


@pytest.mark.parametrize("content", ["max\n", "9223372036854771712\n", None])
def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "memory.max").write_text(content)
    assert 2**28 < machine_bytes(tmp_path) < 2**50
