# SPDX-License-Identifier: Apache-2.0
"""Settings as peft and diffusers write them, with alpha other than rank: the model's output equals that of diffusers or peft."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from safetensors.torch import load_file, save_file

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.located import CONFIG_FILE, DIFFUSERS_WEIGHTS, PEFT_WEIGHTS
from diffusion_worker.lora.pipeline_layers import AdapterLayers, SlotUse
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.families.rig.family import seeded
from support.lora.files import SD3, SD15, WAN, model_of
from support.runner.rig import RunnerRig, image_of_diffusers, levels_apart, request

TARGETS = ["to_q", "to_k", "to_v", "ff.net.2"]
SETTINGS: dict[str, dict[str, Any]] = {
    "alpha": {},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"to_q": 3, "transformer_blocks.1.attn.to_k": 6},
        "alpha_pattern": {"to_k": 5, "transformer_blocks.1.attn.to_v": 7},
    },
    "all of it": {"use_rslora": True, "rank_pattern": {"^transformer_blocks.0.attn.to_q": 2}, "alpha_pattern": {r"\d\.attn\.to_v": 9}},
    "some modules excluded": {"exclude_modules": ["transformer_blocks.0.attn.to_v", "net.2"]},
    "excluded by a pattern": {"exclude_modules": r".*\.0\.attn\.to_[qk]"},
    "layers by their name": {"layers_to_transform": [0], "layers_pattern": "transformer_blocks"},
    "targets by a pattern": {"target_modules": r".*\.attn\.to_[qv]"},
}
# peft warns at each load that it excluded no module, because the file has no such modules.
pytestmark = pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
# A share of the largest output: sums in float32 are in another order.
TOLERANCE = 1e-4


def config(**options: Any) -> peft.LoraConfig:
    """Return a peft configuration for TARGETS, whose LoRA matrices start random and not at zero.

    Rank is 4 and alpha 10 unless `options` say otherwise. Seeds torch.
    """
    torch.manual_seed(5)
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 10, "init_lora_weights": False, "target_modules": TARGETS} | options)


def output_of(transformer: Any) -> torch.Tensor:
    """Return the output of the tiny SD3 transformer for a fixed input."""
    inputs = {"encoder_hidden_states": seeded(2, 1, 8, 32), "pooled_projections": seeded(3, 1, 32), "timestep": torch.tensor([500.0])}
    with torch.inference_mode():
        result: torch.Tensor = transformer.eval()(hidden_states=seeded(1, 1, 4, 16, 16), **inputs, return_dict=False)[0]
        return result


def ours(
    path: Path, pipeline: Any, run: Callable[[Any], torch.Tensor] = output_of, component: str = "transformer", **options: Any
) -> torch.Tensor:
    """Put our LoRA layers into a component, with the adapter of a file at scale 1, and return its output; the pipeline stays changed."""
    model = model_of(pipeline)
    layers = AdapterLayers(model.components, slots=1, max_rank=8, device=torch.device("cpu"))
    layers.write(0, layers.pack(read_checkpoint(str(path), model=model, options=LoadOptions(**options)), name="style"))
    with torch.inference_mode(), layers.rows([[SlotUse(0, 1.0)]]):
        return run(pipeline.components[component])


def assert_same_output(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> None:
    """Assert that two outputs are equal within TOLERANCE, and that the expected one is far from that of the base model."""
    largest = float(expected.abs().max())
    assert float((expected - base).abs().max()) > 0.05 * largest
    assert float((found - expected).abs().max()) <= TOLERANCE * largest


# --- one model: save_lora_adapter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_file_of_save_lora_adapter_makes_the_output_that_diffusers_makes_of_it(options: dict[str, Any], tmp_path: Path) -> None:
    trained = SD3().transformer
    trained.add_adapter(config(**options))
    trained.save_lora_adapter(tmp_path)
    loaded = SD3().transformer
    loaded.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    torch.testing.assert_close(output_of(loaded), output_of(trained))
    assert_same_output(ours(tmp_path / DIFFUSERS_WEIGHTS, SD3()), output_of(loaded), output_of(SD3().transformer))


def test_a_file_of_save_lora_adapter_is_for_a_unet_where_that_is_the_denoiser(tmp_path: Path) -> None:
    def run(unet: Any) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = unet.eval()(seeded(1, 1, 4, 8, 8), 500, seeded(2, 1, 8, unet.config.cross_attention_dim)).sample
            return result

    trained = SD15().unet
    trained.add_adapter(config(alpha_pattern={"to_k": 3}))
    trained.save_lora_adapter(tmp_path)
    assert_same_output(ours(tmp_path, SD15(), run, "unet"), run(trained), run(SD15().unet))


def test_a_file_of_save_lora_adapter_can_be_asked_for_as_the_second_denoisers(tmp_path: Path) -> None:
    trained = WAN().transformer
    trained.add_adapter(config(target_modules=["to_q", "to_k"]))
    trained.save_lora_adapter(tmp_path)
    read = read_checkpoint(str(tmp_path), options=LoadOptions(components=["transformer_2"]))
    assert {(name.partition(".")[0], part.scaling) for name, part in read.modules.items()} == {("transformer_2", 2.5)}


@pytest.mark.slow
def test_an_image_with_a_file_of_save_lora_adapter_is_that_of_diffusers(tmp_path: Path) -> None:
    rig = RunnerRig(max_loras=2)
    assert rig.runner.loras is not None
    plain = load_pipeline(rig.config, torch.float32)
    base = image_of_diffusers(plain, request("base"))
    plain.transformer.add_adapter(config(lora_alpha=1, target_modules=["to_q", "to_k", "to_v"]))
    plain.transformer.save_lora_adapter(tmp_path)
    rig.runner.loras.add_adapter(LoRARequest("style", 1, str(tmp_path)))
    spec = request("styled", loras=[LoRAUse(1, 1.0)])
    images, errors = rig.run(spec)
    assert not errors
    expected = image_of_diffusers(plain, spec)
    assert levels_apart(images["styled"], expected) <= 1
    assert levels_apart(expected, base) > 16


# --- a pipeline, and peft's own folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_file_of_save_lora_weights_with_several_components_makes_the_output_of_diffusers(options: dict[str, Any], tmp_path: Path) -> None:
    def encode(encoder: Any) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = encoder.eval()(torch.arange(8)[None]).last_hidden_state
            return result

    pipeline = SD3()
    pipeline.transformer.add_adapter(config(**options))
    pipeline.text_encoder.add_adapter(config(r=2, lora_alpha=9, target_modules=["q_proj", "v_proj"]))
    parts = {"transformer": pipeline.transformer, "text_encoder": pipeline.text_encoder}
    factors = {f"{name}_lora_layers": peft.get_peft_model_state_dict(part, adapter_name="default") for name, part in parts.items()}
    pipeline.save_lora_weights(tmp_path, **factors, **_collate_lora_metadata(parts))
    loaded = SD3()
    loaded.load_lora_weights(tmp_path)
    assert_same_output(ours(tmp_path, SD3()), output_of(loaded.transformer), output_of(SD3().transformer))
    assert_same_output(ours(tmp_path, SD3(), encode, "text_encoder"), encode(loaded.text_encoder), encode(SD3().text_encoder))


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_folder_of_save_pretrained_makes_the_output_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    peft.get_peft_model(SD3().transformer, config(**options)).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(SD3().transformer, str(tmp_path))
    assert_same_output(ours(tmp_path, SD3()), output_of(loaded), output_of(SD3().transformer))


def test_alphas_beside_the_factors_make_the_output_of_peft_with_those_alphas(tmp_path: Path) -> None:
    alphas = {"to_q": 1.0, "to_k": 6.0, "to_v": 11.0, "net.2": 3.0}
    trained = SD3().transformer
    trained.add_adapter(config(alpha_pattern=alphas))
    tensors = {}
    for name, tensor in peft.get_peft_model_state_dict(trained, adapter_name="default").items():
        module = name.partition(".lora_")[0]
        tensors[f"transformer.{name}"] = tensor.contiguous()
        tensors[f"transformer.{module}.alpha"] = torch.tensor(next(alpha for end, alpha in alphas.items() if module.endswith(end)))
    save_file(tensors, tmp_path / "style.safetensors")
    assert_same_output(ours(tmp_path, SD3()), output_of(trained), output_of(SD3().transformer))


# --- settings that are not supported ----------------------------------------------------------------------------------------


def saved(folder: Path, **metadata: Any) -> Path:
    """Write an adapter file with diffusers' `save_lora_adapter`, change settings in its metadata, and return its path."""
    trained = copy.deepcopy(SD3().transformer)
    trained.add_adapter(config())
    trained.save_lora_adapter(folder)
    path = folder / DIFFUSERS_WEIGHTS
    settings = trained.peft_config["default"].to_dict() | {"target_modules": TARGETS, **metadata}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(settings)})
    return path


def refused(path: Path, *says: str) -> ErrorCode:
    """Read an adapter that must be refused with these words and its name; return the error's code."""
    with pytest.raises(RequestError) as refusal:
        read_checkpoint(str(path), name="style", model=model_of(SD3()))
    for text in ("adapter 'style'", *says):
        assert text in refusal.value.message, refusal.value.message
    return refusal.value.code


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"lora_gain": 3.0}, "UnsupportedFormat", "expected settings that this worker knows, found lora_gain 3.0"),
        ({"init_lora_weights": "singular"}, "UnsupportedFormat", "that this worker knows, found init_lora_weights 'singular'"),
        ({"use_dora": True}, "UnsupportedFormat", "use_dora True"),
        ({"peft_type": "LOKR"}, "UnsupportedFormat", "peft_type 'LOKR'"),
        ({"r": 5}, "InvalidAdapter", "expected rank 5 as the configuration says, found 4"),
        ({"lora_alpha": "10"}, "InvalidAdapter", "lora_alpha"),
        ({"target_modules": ["to_q"]}, "InvalidAdapter", "is none of the configuration's target_modules"),
        ({"exclude_modules": ["to_q"]}, "InvalidAdapter", "attn.to_q is excluded by the configuration's exclude_modules"),
        ({"exclude_modules": r".*\.1\.attn\.to_k"}, "InvalidAdapter", "transformer_blocks.1.attn.to_k is excluded by the"),
        ({"layers_to_transform": [0]}, "InvalidAdapter", "is excluded by the configuration's layers_to_transform"),
        ({"layers_to_transform": 1, "layers_pattern": ["joint", "transformer_blocks"]}, "InvalidAdapter", "layers_to_transform"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "joint"}, "InvalidAdapter", "layers_to_transform"),
        ({"layers_pattern": "transformer_blocks"}, "InvalidAdapter", "expected layers_to_transform, as layers_pattern is set"),
        ({"layers_to_transform": 0, "target_modules": "all-linear"}, "InvalidAdapter", "expected a list as target_modules"),
        ({"exclude_modules": 3}, "InvalidAdapter", "exclude_modules"),
        ({"transformer.r": 4}, "InvalidAdapter", "expected a component's name before every field or before none, found"),
    ],
)
def test_flat_settings_that_are_not_understood_refuse_the_adapter_by_name(
    changes: dict[str, Any], code: str, says: str, tmp_path: Path
) -> None:
    assert refused(saved(tmp_path, **changes), says) == code


def test_settings_of_a_later_peft_that_are_off_refuse_nothing(tmp_path: Path) -> None:
    read = read_checkpoint(str(saved(tmp_path, lora_gain=None, use_better_lora=False, shapes={})))
    assert {part.scaling for part in read.modules.values()} == {2.5}


def test_settings_for_another_component_than_the_tensors_are_of_refuse_the_adapter(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for named, says in (
        ("unet", "expected peft's settings for component transformer, found those for unet only"),
        ("dit", "transformer.r"),
    ):
        save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps({f"{named}.r": 4, f"{named}.lora_alpha": 10})})
        assert refused(path, says) is ErrorCode.INVALID_ADAPTER


def test_settings_of_one_component_do_not_count_for_another_one_of_the_file(tmp_path: Path) -> None:
    tensors = {f"{name}.lora_{part}.weight": torch.ones(4, 4) for name in ("transformer.a", "text_encoder.b") for part in "AB"}
    for settings in ({"r": 4, "lora_alpha": 8}, {"transformer.r": 4, "transformer.lora_alpha": 8}):
        save_file(tensors, tmp_path / "style.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
        assert (
            refused(tmp_path, "expected peft's settings for component text_encoder, found those for transformer only") == "InvalidAdapter"
        )


def test_settings_in_two_places_refuse_the_adapter(tmp_path: Path) -> None:
    path = saved(tmp_path).rename(tmp_path / PEFT_WEIGHTS)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 10}))
    assert refused(path, "expected peft's settings in one place") is ErrorCode.INVALID_ADAPTER


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_adapter_that_its_scaling_makes_infinite_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4)}).to(dtype)
    layers = AdapterLayers({"transformer": model}, slots=1, max_rank=4, device=torch.device("cpu"))
    tensors = {f"transformer.{name}.lora_{letter}.weight": torch.ones(2, 4).mT if letter == "B" else torch.ones(2, 4)
               for name in model for letter in "AB"}  # fmt: skip
    for alpha, fits in ((2 * torch.finfo(dtype).max, True), (2.1 * torch.finfo(dtype).max, False)):
        settings = {"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {"second": alpha}}
        metadata = {"lora_adapter_metadata": json.dumps(settings)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors", metadata)
        checkpoint = read_checkpoint(str(tmp_path), name="style")
        if fits:
            assert layers.pack(checkpoint, name="style").rank == 2
            continue
        with pytest.raises(
            RequestError, match=r"'style': module transformer\.second: multiplied by its scaling, .* too large for float"
        ) as refused:
            layers.pack(checkpoint, name="style")
        assert refused.value.code is ErrorCode.INVALID_ADAPTER
