# SPDX-License-Identifier: Apache-2.0
"""Adapters on a rank: equal to peft for each row, and refused as a whole if they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from diffusion_worker.lora.layers import LoRALinear
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.runner.rig import RunnerRig, image_of_diffusers, request
from support.worker.process import DIGITS

STRIPES, FRAME, PAPER = (DIGITS / "loras" / name for name in ("stripes", "frame", "paper"))


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    rig = RunnerRig(max_loras=2, max_lora_rank=16)
    assert rig.runner.loras is not None
    for number, folder in enumerate([STRIPES, FRAME], start=1):
        rig.runner.loras.add_adapter(LoRARequest(folder.name, number, str(folder)))
    return rig


def with_peft(rig: RunnerRig, folder: Path, scale: float = 1.0) -> Any:
    """Load the pipeline without the worker's layers, with peft around the transformer, as the reference in comparisons.

    The strength of the adapter in `folder` is multiplied by `scale`.
    """
    pipeline = load_pipeline(rig.config, torch.float32)
    pipeline.transformer = peft.PeftModel.from_pretrained(pipeline.transformer, str(folder)).base_model.model
    for module in pipeline.transformer.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling = {name: value * scale for name, value in module.scaling.items()}
    return pipeline


def levels_apart(one: Any, other: Any) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.parametrize(("folder", "number", "scale"), [(STRIPES, 1, 1.0), (FRAME, 2, 0.5)])
def test_an_image_with_an_adapter_equals_the_one_of_peft(rig: RunnerRig, folder: Path, number: int, scale: float) -> None:
    spec = request("styled", loras=[LoRAUse(number, scale)])
    images, _ = rig.run(spec)
    assert levels_apart(images["styled"], image_of_diffusers(with_peft(rig, folder, scale), spec)) <= 1


def test_different_adapters_and_none_share_a_step_and_each_row_has_its_own(rig: RunnerRig) -> None:
    specs = [request("base"), request("stripes", loras=[LoRAUse(1, 1.0)]), request("frame", loras=[LoRAUse(2, 1.0)])]
    alone = {spec.request_id: rig.run(spec)[0][spec.request_id] for spec in specs}
    together, _ = rig.run(*specs)
    assert [call.rows for call in rig.denoiser_calls()] == [6, 6, 6]
    for name, image in together.items():
        assert levels_apart(image, alone[name]) <= 1
        others = [levels_apart(image, other) for other_name, other in alone.items() if other_name != name]
        assert min(others) > 3


def test_a_prompt_is_encoded_once_for_all_adapters_for_none_of_them_changes_a_text_encoder(rig: RunnerRig) -> None:
    prompt = "new kumquatfen"
    rig.run(request("base", prompt=prompt, steps=1))
    assert [call.rows for call in rig.parallel.calls if call.component == "text_encoder"]
    rig.run(request("styled", prompt=prompt, steps=1, loras=[LoRAUse(1, 1.0)]))
    assert not [call for call in rig.parallel.calls if call.component == "text_encoder"]
    loras = rig.runner.loras
    assert loras is not None
    assert loras.identity_in("text_encoder", [LoRAUse(1, 1.0)]) is None
    # The identity in a module is made of the digests and scales of the adapters that change it.
    uses: list[list[LoRAUse]] = [[], [LoRAUse(1, 1.0)], [LoRAUse(1, 0.5)], [LoRAUse(2, 1.0)], [LoRAUse(1, 1.0), LoRAUse(2, 1.0)]]
    assert len({loras.identity_in("transformer", each) for each in uses}) == 5


def test_an_adapter_at_strength_zero_is_the_base(rig: RunnerRig) -> None:
    images, _ = rig.run(request("base"), request("zero", loras=[LoRAUse(1, 0.0)]))
    np.testing.assert_array_equal(images["base"], images["zero"])


def test_after_adapters_were_removed_the_base_is_bit_equal_to_the_untouched_model() -> None:
    untouched, touched = RunnerRig(), RunnerRig()
    manager = touched.runner.loras
    assert manager is not None
    manager.add_adapter(LoRARequest("stripes", 7, str(STRIPES)))
    touched.run(request("styled", loras=[LoRAUse(7, 1.0)]))
    assert manager.remove_adapter(7)
    assert not manager.remove_adapter(7)
    assert manager.list_adapters() == []
    np.testing.assert_array_equal(touched.run(request("base"))[0]["base"], untouched.run(request("base"))[0]["base"])


def test_a_request_for_an_adapter_that_was_unloaded_fails_and_is_never_the_base(rig: RunnerRig) -> None:
    images, errors = rig.run(request("stale", loras=[LoRAUse(99, 1.0)]))
    assert images == {}
    assert errors["stale"].code == "AdapterNotLoaded"


@pytest.mark.slow
def test_the_slots_of_adapters_are_in_the_memory_report_by_layers_and_not_by_adapters() -> None:
    rig = RunnerRig(max_loras=2, max_lora_rank=16)
    assert rig.runner.loras is not None
    assert rig.runner.memory().adapter_slots_bytes == 0
    for number, folder in enumerate([STRIPES, FRAME, PAPER], start=1):
        rig.runner.loras.add_adapter(LoRARequest(folder.name, number, str(folder)))
        # Two slots of rank 16 for every layer that some adapter names, and little more.
        columns = sum(part.in_features + part.out_features for part in wrapped_linears(rig))
        assert columns * 2 * 16 * 4 <= rig.runner.memory().adapter_slots_bytes <= columns * 2 * 16 * 4 * 1.05


def wrapped_linears(rig: RunnerRig) -> list[Any]:
    return [part for part in rig.runner.pipeline.transformer.modules() if isinstance(part, LoRALinear)]
