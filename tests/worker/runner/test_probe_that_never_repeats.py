# SPDX-License-Identifier: Apache-2.0
"""Wakes of a model whose kernels add in another order each time: a plain wake passes, and a corrupted weight is found."""

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffusion_worker.engine.startup.wake_verification import Verification
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import RpcReply, WakeCheck
from diffusion_worker.runner.fingerprint import cells_of
from support.runner.rig import RunnerRig
from support.worker.extensions import flip

pytestmark = pytest.mark.slow


class PlantedNondeterminism:
    """A hook that adds to a module's result `size` times the number of the call, so no two calls give the same."""

    def __init__(self, size: float) -> None:
        self._size, self._calls = size, 0

    def __call__(self, module: torch.nn.Module, arguments: Any, result: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return result + self._size * self._calls


def verification_of(rig: RunnerRig) -> Verification:
    async def call(method: str, *, probe: bool, **arguments: Any) -> list[RpcReply]:
        assert method == "fingerprint"
        return [RpcReply(0, 0, msgspec.msgpack.encode(rig.runner.fingerprint(probe=probe)))]

    async def load_again(adapters: Collection[int], timeout_s: float) -> None:
        raise AssertionError("no adapter is loaded")

    return Verification(call, dict, load_again)


@pytest.mark.parametrize(("size", "check"), [(0.0, WakeCheck.EXACT), (0.004, WakeCheck.TOLERANCE), (1.0, WakeCheck.CHECKSUMS)])
async def test_a_wake_passes_and_a_corrupted_weight_is_found_however_far_the_probe_repeats(size: float, check: WakeCheck) -> None:
    rig = RunnerRig()
    rig.runner.pipeline.transformer.proj_out.register_forward_hook(PlantedNondeterminism(size))
    verification = verification_of(rig)
    await verification.record(timeout_s=60)
    assert verification.check is check
    rig.runner.release()
    rig.runner.restore()
    await verification.verify(timeout_s=60)
    flip(rig.runner.weights.tensors()[0])
    with pytest.raises(RequestError, match="rank 0: weights: expected the checksum"):
        await verification.verify(timeout_s=60)


async def test_a_model_whose_result_is_wrong_and_whose_weights_are_right_is_found_within_the_tolerance_too() -> None:
    rig = RunnerRig()
    rig.runner.pipeline.transformer.proj_out.register_forward_hook(PlantedNondeterminism(0.004))
    verification = verification_of(rig)
    await verification.record(timeout_s=60)
    assert verification.check is WakeCheck.TOLERANCE
    rig.runner.pipeline.transformer.proj_out.register_forward_hook(lambda module, arguments, result: -result)
    with pytest.raises(RequestError, match="rank 0: probe: expected each cell of a step's image within 4 of 255 levels"):
        await verification.verify(timeout_s=60)


@pytest.mark.parametrize(
    ("shape", "count"), [((64, 64, 3), 16 * 16 * 3), ((70, 33, 3), 16 * 16 * 3), ((8, 64, 1), 8 * 16), ((9, 64, 64, 3), 4 * 768)]
)
def test_an_image_of_any_size_is_kept_as_few_cells(shape: tuple[int, ...], count: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    cells = cells_of(image)
    assert len(cells) == count
    assert cells_of(np.full(shape, 77, dtype=np.uint8)) == bytes([77]) * count
    first = image.reshape(-1, *shape[-3:])[0][: max(1, shape[-3] // 16), : shape[-2] // 16, 0]
    assert abs(cells[0] - first.astype(float).mean()) <= 0.5
