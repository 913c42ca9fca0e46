# SPDX-License-Identifier: Apache-2.0
"""Quantised denoisers: loaded by diffusers' quantizers, close to the model in full precision, in slabs like any other weights."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_worker.config import Device, Quantization, WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.loading import quantization
from support.runner.digit_judge import has_style, judge
from support.runner.rig import RunnerRig, request
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow
DIGIT = {"height": 64, "width": 64, "steps": 12, "guidance_scale": 4.0}
ASKED = [("red", 7, "seven"), ("blue", 3, "three")]


@pytest.fixture(scope="module")
def plain() -> RunnerRig:
    return RunnerRig()


@pytest.fixture(scope="module", params=["int8", "fp8", "nf4"])
def quantized(request: pytest.FixtureRequest) -> RunnerRig:
    if request.param != "nf4":
        return RunnerRig(quantization=Quantization(request.param))
    with pytest.MonkeyPatch.context() as patch:
        fake_a_gpu_for_nf4(patch)
        return RunnerRig(quantization=Quantization.NF4)


def fake_a_gpu_for_nf4(patch: pytest.MonkeyPatch) -> None:
    """Let nf4 run on a CPU, which bitsandbytes supports. Only the quantizers, diffusers' and ours, ask for a GPU."""
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    patch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    patch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda self, device_map: {"": "cpu"})
    patch.setattr(quantization, "nf4_is_refused", lambda: False)


@pytest.fixture(scope="module")
def drawn(plain: RunnerRig) -> list[np.ndarray[Any, Any]]:
    return images(plain)


def images(rig: RunnerRig, **fields: Any) -> list[np.ndarray[Any, Any]]:
    specs = [request(word, prompt=f"a {colour} digit {word}", **DIGIT | fields) for colour, _, word in ASKED]
    made, errors = rig.run(*specs)
    assert not errors, errors
    return [made[spec.request_id] for spec in specs]


def weights_bytes(rig: RunnerRig) -> int:
    return rig.runner.weights.report().weights_bytes


def test_a_quantized_model_draws_what_it_is_asked_for_and_nearly_the_same_image(
    drawn: list[np.ndarray[Any, Any]], quantized: RunnerRig
) -> None:
    made = images(quantized)
    for (colour, digit, _), verdict in zip(ASKED, map(judge, map(Image.fromarray, made)), strict=True):
        assert verdict == (digit, colour), (colour, digit, verdict)
    kind = str(quantized.config.quantization)
    bound = {"int8": 0.6, "fp8": 2.0, "nf4": 10.0}[kind]
    differences = [float(np.abs(a.astype(int) - b).mean()) for a, b in zip(made, drawn, strict=True)]
    assert 0 < max(differences) < bound, (kind, differences)


def test_quantized_weights_take_less_memory(plain: RunnerRig, quantized: RunnerRig) -> None:
    linears = sum(layer.weight.numel() * 4 for layer in plain.runner.pipeline.transformer.modules() if isinstance(layer, torch.nn.Linear))
    saved = weights_bytes(plain) - weights_bytes(quantized)
    assert saved > 0.7 * linears
    assert quantized.model.weights_bytes == pytest.approx(weights_bytes(quantized), rel=0.02)


def test_quantized_weights_are_given_back_in_sleep_and_are_the_same_bits_after_it(quantized: RunnerRig) -> None:
    if quantized.config.quantization is Quantization.NF4:
        pytest.skip("on a CPU, where nobody can ask for it, bitsandbytes packs four bits again at its first call, out of our memory")
    before = images(quantized, steps=3)
    awake = quantized.runner.weights.report()
    quantized.runner.release()
    asleep = quantized.runner.weights.report()
    assert asleep.weights_resident_bytes < 0.02 * awake.weights_resident_bytes
    quantized.runner.restore()
    for one, other in zip(before, images(quantized, steps=3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_adapters_apply_to_a_quantized_model(quantized: RunnerRig) -> None:
    assert quantized.runner.loras is not None
    quantized.runner.loras.add_adapter(LoRARequest("stripes", 1, str(DIGITS / "loras" / "stripes")))
    for image in images(quantized, loras=[LoRAUse(1, 1.0)]):
        assert has_style(Image.fromarray(image), "stripes")
    quantized.runner.loras.remove_adapter(1)


def test_nf4_is_refused_for_a_rank_on_the_cpu_also_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "nf4_is_refused", lambda: False)
    config = WorkerConfig(model="m", served_name="m", quantization=Quantization.NF4, device=Device.CPU)
    with pytest.raises(ConfigError, match="--quantization nf4: needs a GPU"):
        quantization.quantization_options(config, "transformer", torch.float32)


def test_the_state_document_says_what_the_weights_are(quantized: RunnerRig) -> None:
    assert quantized.model.features["quantization"] == str(quantized.config.quantization)


def test_new_contents_for_a_quantized_tensor_are_refused_by_its_name(quantized: RunnerRig) -> None:
    name = "transformer.transformer_blocks.0.attn.to_q.weight"
    with pytest.raises(RequestError, match=f"{name} .quantised, its weights cannot be replaced.") as refused:
        quantized.runner.load_weights([(name, torch.zeros(128, 128))])
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_four_bits_are_refused_on_a_cpu_by_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match="--quantization nf4: needs a GPU"):
        RunnerRig(quantization=Quantization.NF4)


def test_a_model_without_a_denoiser_to_quantize_is_refused() -> None:
    config = WorkerConfig(model="m", served_name="m", quantization=Quantization.INT8)
    with pytest.raises(ConfigError, match=r"--quantization int8: expected a model with one of .*transformer.*, found only vae"):
        quantization.require_quantizable(config, ["vae"])


def test_only_denoisers_are_quantized() -> None:
    config = WorkerConfig(model="m", served_name="m", quantization=Quantization.INT8)
    assert quantization.quantization_options(config, "vae", torch.float32) == {}
    assert list(quantization.quantization_options(config, "transformer", torch.float32)) == ["quantization_config"]
