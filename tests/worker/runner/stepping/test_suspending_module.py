# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a shared module: its attributes are those of the module, and each call of it suspends the request."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import Gemma2Config, Gemma2Model, Qwen2Config, Qwen2ForCausalLM

from diffusion_worker.messages import Tick
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule, forget_copies
from support.families.rig.family import tiny_vae
from support.runner.rig import RunnerRig, request


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    return tiny_vae().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


def asked_by(body: Callable[[], Any]) -> ModelCall:
    """Start a request whose work is `body`, and return the model call at which it suspends; any other first event fails the test."""
    event = DiffusionRequestState(request("a"), body).resume()
    assert isinstance(event, ModelCall), event
    return event


def test_it_is_an_instance_of_its_modules_class_with_its_attributes(vae: AutoencoderKL) -> None:
    model: Any = SuspendingModule("vae", vae)
    assert isinstance(model, AutoencoderKL)
    assert model.config is vae.config
    assert model.dtype == torch.float32
    assert not hasattr(model, "no_such_attribute")
    assert inspect.signature(model.decode) == inspect.signature(vae.decode)
    assert inspect.signature(model.forward) == inspect.signature(vae.forward)


@pytest.mark.parametrize("method", ["encode", "decode", "forward"])
def test_what_computes_is_asked_of_the_engine_with_arguments_by_name(vae: AutoencoderKL, method: str) -> None:
    model: Any = SuspendingModule("vae", vae)
    pixels = torch.ones(1, 3, 8, 8)
    call = asked_by(lambda: getattr(model, method)(pixels, return_dict=False))
    assert (call.component, call.method, call.module) == ("vae", method, vae)
    assert next(iter(call.arguments.values())) is pixels
    assert call.arguments["return_dict"] is False


def test_arguments_that_a_module_takes_as_any_others_are_not_nested() -> None:
    class Open(torch.nn.Module):
        def forward(self, x: torch.Tensor, **others: Any) -> Any:
            return x, others

    model: Any = SuspendingModule("encoder", Open())
    assert list(asked_by(lambda: model(torch.ones(1), output_hidden_states=True)).arguments) == ["x", "output_hidden_states"]


def test_a_step_cache_of_the_shared_model_is_not_entered(rig: RunnerRig) -> None:
    denoiser = rig.runner.pipeline.transformer
    assert isinstance(denoiser, SD3Transformer2DModel)
    model: Any = SuspendingModule("transformer", denoiser)
    with model.cache_context("cond"):
        pass
    assert not hasattr(denoiser, "_diffusers_hook")


def test_another_precision_is_for_one_request_only_and_the_shared_weights_stay_where_they_are(vae: AutoencoderKL) -> None:
    places = [parameter.data_ptr() for parameter in vae.parameters()]
    one: Any = SuspendingModule("vae", vae)
    other: Any = SuspendingModule("vae", vae)
    one.to(dtype=torch.float64)
    call = asked_by(lambda: one.decode(torch.ones(1, 4, 4, 4, dtype=torch.float64)))
    assert call.module is not vae
    assert (call.module.dtype, one.dtype, other.dtype, vae.dtype) == (torch.float64, torch.float64, torch.float32, torch.float32)
    assert next(one.post_quant_conv.parameters()).dtype == torch.float64
    assert [parameter.data_ptr() for parameter in vae.parameters()] == places
    third: Any = SuspendingModule("vae", vae)
    third.to(torch.float64)
    assert asked_by(lambda: third.decode(torch.ones(1, 4, 4, 4))).module is call.module
    one.to(dtype=torch.float32)
    assert asked_by(lambda: one.decode(torch.ones(1, 4, 4, 4))).module is vae
    forget_copies()


def test_decoding_in_another_precision_gives_what_the_converted_module_gives(rig: RunnerRig) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)).double()

    def body() -> Any:
        model: Any = SuspendingModule("vae", rig.runner.pipeline.vae)
        model.to(dtype=torch.float64)
        decoded = model.decode(latents, return_dict=False)[0]
        model.to(dtype=torch.float32)
        return decoded

    rig.runner.join(request("a"), body)
    decoded = rig.runner.execute_stepwise(Tick(1)).images["a"]
    vae = rig.runner.pipeline.vae
    plain = type(vae).from_config(vae.config).double().eval()
    plain.load_state_dict(vae.state_dict())
    with torch.inference_mode():
        assert torch.equal(decoded, plain.decode(latents).sample)
    assert vae.dtype == torch.float32
    forget_copies()


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def language_models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(1)
    shared = SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 32}
    return {
        "Gemma2": Gemma2Model(Gemma2Config(**shared, head_dim=8, sliding_window=8)).eval().requires_grad_(False),
        "Qwen2": Qwen2ForCausalLM(Qwen2Config(**shared)).eval().requires_grad_(False),
    }


@pytest.mark.parametrize("name", ["Gemma2", "Qwen2"])
def test_a_language_model_as_encoder_keeps_no_keys_and_values_and_says_the_same_bit_for_bit(name: str) -> None:
    encoder = language_models()[name]
    tokens, mask = torch.arange(12).reshape(1, 12) + 3, torch.ones(1, 12, dtype=torch.long)
    mask[0, :2] = 0
    model: Any = SuspendingModule("text_encoder", encoder)
    call = asked_by(lambda: model(input_ids=tokens, attention_mask=mask, output_hidden_states=True))
    assert call.arguments["use_cache"] is False
    with torch.inference_mode():
        ours, plain = encoder(**call.arguments), encoder(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
    assert plain.past_key_values is not None
    assert ours.past_key_values is None
    for one, other in zip(ours.hidden_states, plain.hidden_states, strict=True):
        assert torch.equal(one, other)


def test_a_pipeline_that_generates_from_keys_and_values_keeps_them() -> None:
    model: Any = SuspendingModule("language_model", language_models()["Qwen2"])
    call = asked_by(lambda: model(input_ids=torch.ones(1, 3, dtype=torch.long), past_key_values=None))
    assert "use_cache" not in call.arguments
