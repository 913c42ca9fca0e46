# SPDX-License-Identifier: Apache-2.0
"""Components read straight to their place equal those of `from_pretrained` bit for bit; folders that do not fit are clear errors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.runner.loading.component import is_loadable, load_component
from support.families.rig.all import FAMILIES
from support.families.rig.family import tiny_vae
from support.worker.process import DIGITS_MODEL

CPU = torch.device("cpu")


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; tied ones have an entry for each name."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def ties_of(module: torch.nn.Module) -> set[str]:
    tensors = tensors_of(module)
    places = [tensor.data_ptr() for tensor in tensors.values()]
    return {name for name, tensor in tensors.items() if tensor.numel() and places.count(tensor.data_ptr()) > 1}


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    one, other = tensors_of(found), tensors_of(expected)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor, other[name]), name
    assert ties_of(found) == ties_of(expected)
    assert type(found) is type(expected) and not found.training


def placed(kind: Any, folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, ModelWeights, bool]:
    """Load a component into slabs, and let it sleep and wake once.

    Return it, its weights, and whether tensors of it were left to be read straight from the file into the slabs.
    """
    unread, weights = Placeholders(), ModelWeights(CPU)
    module = load_component("part", kind, folder, dtype, unread=unread)
    straight = any(unread.stored_of(parameter) for parameter in module.parameters())
    weights.place(module, folder, unread=unread)
    weights.release()
    weights.restore()
    return module, weights, straight


def check_equal(kind: Any, folder: Path, dtype: torch.dtype, *, straight: bool = True) -> ModelWeights:
    module, weights, was_straight = placed(kind, folder, dtype)
    assert_same(module, kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True))
    assert was_straight is straight
    return weights


DIGITS = {
    "transformer": diffusers.SD3Transformer2DModel,
    "vae": diffusers.AutoencoderKL,
    "text_encoder": transformers.CLIPTextModelWithProjection,
}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.slow), "vae", "text_encoder"])
def test_a_component_read_to_its_place_equals_from_pretrained_and_is_in_no_memory_of_its_own(name: str, dtype: torch.dtype) -> None:
    weights = check_equal(DIGITS[name], DIGITS_MODEL / name, dtype)
    report = weights.report()
    # Only the text encoder's position ids are computed.
    assert report.mirror_memory_bytes <= 1024
    assert report.mirror_file_bytes == report.weights_bytes - report.mirror_memory_bytes > 0


@pytest.mark.slow
def test_every_kind_of_component_of_every_family_is_read_as_from_pretrained_loads_it(tmp_path: Path) -> None:
    seen: set[str] = set()
    # A loaded IP-Adapter changes the config of its model into one that cannot be loaded again. Several ControlNets cannot be saved.
    for family in (family for family in FAMILIES if "IP-Adapter" not in family.name and "two ControlNets" not in family.name):
        for name, part in family.build().components.items():
            key = f"{type(part).__name__} {getattr(part, 'config', '')}"
            if key in seen or not is_loadable(type(part)):
                continue
            seen.add(key)
            folder = tmp_path / f"{len(seen)}-{name}"
            part.save_pretrained(folder)
            try:
                check_equal(type(part), folder, torch.bfloat16)
            except AssertionError as error:
                raise AssertionError(f"{family.name}, {name}: {error}") from error
            shutil.rmtree(folder)
    assert len(seen) > 130


@pytest.fixture
def vae_folder(tmp_path: Path) -> Path:
    """Provide the folder of a small VAE."""
    torch.manual_seed(0)
    tiny_vae().save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_layers_by_the_names_of_old_versions_are_found(vae_folder: Path) -> None:
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "attentions" in name]:
            new = next((name.replace(word, before) for word, before in old.items() if f".{word}." in name), name)
            tensors[new] = tensors.pop(name)

    rewrite(vae_folder, rename)
    assert any("proj_attn" in name for name in load_file(next(vae_folder.glob("*.safetensors"))))
    check_equal(diffusers.AutoencoderKL, vae_folder, torch.float32)


def test_shards_of_a_component_equal_from_pretrained(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_equal(diffusers.AutoencoderKL, tmp_path, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_what_a_class_keeps_in_float32_is_kept_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(diffusers.AutoencoderKL, "_keep_in_fp32_modules", ["conv_in"])
    tiny_vae().to(torch.bfloat16).save_pretrained(tmp_path)
    weights = check_equal(diffusers.AutoencoderKL, tmp_path, dtype)
    assert weights.report().mirror_memory_bytes == 0


def t5(**config: Any) -> Any:
    defaults = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    return transformers.T5EncoderModel(transformers.T5Config(**defaults | config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_text_encoder_keeps_its_ties_and_what_transformers_keeps_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    t5().save_pretrained(tmp_path)
    module, _, _ = placed(transformers.T5EncoderModel, tmp_path, dtype)
    assert ties_of(module) == {"shared.weight", "encoder.embed_tokens.weight"}
    check_equal(transformers.T5EncoderModel, tmp_path, dtype)


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_are_in_the_file_twice_are_tied_where_they_are_equal(tmp_path: Path, same: bool) -> None:
    t5().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"encoder.embed_tokens.weight": tensors["shared.weight"] * (1 if same else 2)}))
    module, _, _ = placed(transformers.T5EncoderModel, tmp_path, torch.float32)
    assert bool(ties_of(module)) is same
    check_equal(transformers.T5EncoderModel, tmp_path, torch.float32)


def test_a_model_whose_tensors_are_fused_on_the_way_is_loaded_by_from_pretrained_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32)
    transformers.MixtralModel(config).save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        check_equal(transformers.MixtralModel, tmp_path, torch.float32, straight=False)
    assert "component part: loaded by MixtralModel.from_pretrained: no file has the tensor layers.0.mlp.experts" in caplog.text


def test_the_only_variant_of_a_component_is_loaded(vae_folder: Path) -> None:
    expected = diffusers.AutoencoderKL.from_pretrained(vae_folder)
    path = next(vae_folder.glob("*.safetensors"))
    path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    module, _, straight = placed(diffusers.AutoencoderKL, vae_folder, torch.float32)
    assert straight
    assert_same(module, expected)
    assert_same(load_component("vae", diffusers.AutoencoderKL, vae_folder, torch.float32), expected)


def test_options_of_from_pretrained_make_it_load_the_component(vae_folder: Path) -> None:
    unread = Placeholders()
    module = load_component("vae", diffusers.AutoencoderKL, vae_folder, torch.float32, unread=unread, low_cpu_mem_usage=False)
    assert not any(unread.stored_of(parameter) for parameter in module.parameters())
    assert_same(module, diffusers.AutoencoderKL.from_pretrained(vae_folder))


def without(*names: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


IN, OUT = "encoder.conv_in.weight", "decoder.conv_out.bias"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (lambda folder: rewrite(folder, without(OUT)), f"no file has a value for tensor {OUT}, which the model needs"),
    "many are missing": (
        lambda folder: rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "conv_in" in name]),
        r"no file has a value for 4 tensors \(decoder.conv_in.bias, decoder.conv_in.weight, encoder.conv_in.bias, …\)",
    ),
    "another shape": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({OUT: torch.zeros(5)})),
        rf"diffusion_pytorch_model.safetensors: tensor {OUT}: expected the shape \(3,\), found \(5,\)",
    ),
    "integers": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({OUT: torch.zeros(3, dtype=torch.int64)})),
        f"diffusion_pytorch_model.safetensors: tensor {OUT}: expected a floating-point type, found int64",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: No such file"),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"act_fn": '), "config.json is not a JSON object"),
    "a list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "a config of another class": (
        lambda folder: (folder / "config.json").write_text('{"block_out_channels": "many"}'),
        "AutoencoderKL cannot be loaded from .*vae: ",
    ),
    "no folder": (shutil.rmtree, "expected a folder .*vae, found nothing there"),
    "pickled weights": (
        lambda folder: next(folder.glob("*.safetensors")).rename(folder / "diffusion_pytorch_model.bin"),
        "found only diffusion_pytorch_model.bin, and pickled weights are never loaded",
    ),
    "no weights": (lambda folder: next(folder.glob("*.safetensors")).unlink(), "expected weights in diffusion_pytorch_model.safetensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_fit_its_class_is_refused_with_what_is_wrong(vae_folder: Path, fault: str) -> None:
    breaks, says = FAULTS[fault]
    breaks(vae_folder)
    with pytest.raises(ConfigError, match=f"component vae: .*({says})"):
        load_component("vae", diffusers.AutoencoderKL, vae_folder, torch.float32, unread=Placeholders())


TEXT_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (without("encoder.final_layer_norm.weight"), "no file has a value for tensor encoder.final_layer_norm.weight"),
    "another shape": (
        lambda tensors: tensors.update({"encoder.final_layer_norm.weight": torch.zeros(5)}),
        r"tensor encoder.final_layer_norm.weight: expected the shape \(16,\), found \(5,\)",
    ),
    "integers": (
        lambda tensors: tensors.update({"encoder.final_layer_norm.weight": torch.zeros(16, dtype=torch.int32)}),
        "model.safetensors: tensor encoder.final_layer_norm.weight: expected a floating-point type, found int32",
    ),
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_a_text_encoder_that_does_not_fit_is_refused_and_never_made_up(tmp_path: Path, fault: str) -> None:
    change, says = TEXT_FAULTS[fault]
    t5().save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=f"component text: .*{says}"):
        load_component("text", transformers.T5EncoderModel, tmp_path, torch.float32, unread=Placeholders())


@pytest.mark.parametrize("unread", [Placeholders(), None])
def test_a_component_without_a_tensor_is_refused_by_either_way_of_loading(vae_folder: Path, unread: Placeholders | None) -> None:
    rewrite(vae_folder, without(OUT))
    with pytest.raises(ConfigError, match=f"component vae: .*: no file has a value for tensor {OUT}, which the model needs"):
        load_component("vae", diffusers.AutoencoderKL, vae_folder, torch.float32, unread=unread)


@pytest.mark.parametrize("unread", [Placeholders(), None])
def test_tensors_that_nothing_uses_are_named(vae_folder: Path, unread: Placeholders | None, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(vae_folder, lambda tensors: tensors.update(extra=torch.zeros(3), other=torch.zeros(3)))
    load_component("vae", diffusers.AutoencoderKL, vae_folder, torch.float32, unread=unread)
    assert "component vae: its files have 2 tensors (extra, other) that AutoencoderKL does not use" in caplog.text
