# SPDX-License-Identifier: Apache-2.0
"""Adapter files and configurations: those that are accepted, and everything that is read of them besides the factors."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint
from diffusion_worker.lora.header import read_header
from diffusion_worker.lora.located import DIFFUSERS_WEIGHTS, PEFT_WEIGHTS
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.messages import Recipe
from support.lora.adapters import changed_adapter
from support.worker.process import DIGITS

STRIPES = DIGITS / "loras" / "stripes"
State = dict[str, torch.Tensor]


def factors(module: str = "transformer.blocks.0.to_q", *, rank: int = 2, dtype: torch.dtype = torch.float32) -> State:
    """Make random LoRA matrices for one linear layer, keyed as in a diffusers file; equal arguments give equal values.

    Matrix A is `rank` by 8 and B is 6 by `rank`.
    """
    generator = torch.Generator().manual_seed(len(module))
    return {
        f"{module}.lora_A.weight": torch.randn(rank, 8, generator=generator).to(dtype),
        f"{module}.lora_B.weight": torch.randn(6, rank, generator=generator).to(dtype),
    }


def written(folder: Path, state: State, metadata: dict[str, str] | None = None) -> str:
    """Save tensors to style.safetensors in the folder, with the metadata in its header. Return the full path as a string."""
    save_file(state, folder / "style.safetensors", metadata)
    return str(folder / "style.safetensors")


def refusal(path: str | Path, **options: Any) -> RequestError:
    """Read an adapter that must be refused, and return the error, which names the adapter."""
    with pytest.raises(RequestError) as refused:
        read_checkpoint(str(path), name="style", options=LoadOptions(**options))
    assert "adapter 'style'" in refused.value.message
    return refused.value


def first_key(state: State, part: str) -> str:
    return next(key for key in sorted(state) if f"lora_{part}" in key)


# --- peft folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ({"peft_type": "LOHA"}, "UnsupportedFormat", "peft_type 'LOHA'"),
        ({"use_dora": True}, "UnsupportedFormat", "use_dora"),
        ({"bias": "all"}, "UnsupportedFormat", "bias 'all'"),
        ({"modules_to_save": ["proj_out"]}, "UnsupportedFormat", "modules_to_save"),
        ({"lora_bias": True}, "UnsupportedFormat", "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "UnsupportedFormat", "changes the base model"),
        ({"lora_alpha": None}, "InvalidAdapter", "lora_alpha"),
        ({"r": 4}, "InvalidAdapter", "expected rank 4 as the configuration says, found 8"),
        ({"rank_pattern": {"to_q": 2}}, "InvalidAdapter", "to_q: expected rank 2"),
        ({"target_modules": ["to_q"]}, "InvalidAdapter", "target_modules"),
        ({"alpha_pattern": {"(a": 2}}, "InvalidAdapter", "is not a regular expression"),
    ],
)
def test_a_configuration_that_would_not_be_applied_exactly_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], code: str, says: str
) -> None:
    refused = refusal(changed_adapter(tmp_path, STRIPES, config=config))
    assert (refused.code, says in refused.message) == (code, True), refused.message


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (lambda state: {}, "none at all"),
        (lambda state: state | {"stranger": torch.ones(2)}, "found stranger"),
        (lambda state: {key: value for key, value in state.items() if key != first_key(state, "B")}, "has no lora_B"),
        (lambda state: state | {first_key(state, "A"): torch.full_like(state[first_key(state, "A")], torch.nan)}, "not finite"),
        (
            lambda state: state | {first_key(state, "B"): torch.full_like(state[first_key(state, "B")], -torch.inf)},
            "values that are not finite",
        ),
        (lambda state: state | {first_key(state, "A"): torch.ones(3, 128)}, "expected shapes with one rank"),
        (
            lambda state: state | {first_key(state, "A"): torch.ones(0, 128), first_key(state, "B"): torch.ones(128, 0)},
            "expected shapes with one rank",
        ),
        (
            lambda state: state | {first_key(state, "A"): torch.ones(8, 128, dtype=torch.int64)},
            "expected one of the dtypes F16, BF16, F32, F64, found I64",
        ),
    ],
)
def test_weights_that_are_no_lora_are_refused_with_the_first_wrong_name(tmp_path: Path, tensors: Any, says: str) -> None:
    refused = refusal(changed_adapter(tmp_path, STRIPES, tensors=tensors))
    assert refused.code is ErrorCode.INVALID_ADAPTER
    assert says in refused.message
    if says not in ("none at all", "found stranger"):
        assert "add_k_proj" in refused.message  # the first module of all


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"to_q": 3, "blocks.1.attn.to_k": 5}}, {"lora_alpha": 20}])
def test_scaling_is_that_of_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = changed_adapter(tmp_path, STRIPES, config=config)
    read = read_checkpoint(str(folder))
    settings = peft.LoraConfig.from_pretrained(str(folder))
    for name, module in read.modules.items():
        path = name.removeprefix("transformer.")
        alpha = settings.alpha_pattern.get(get_pattern_key(settings.alpha_pattern, path), settings.lora_alpha)
        assert module.scaling == pytest.approx(alpha / (8**0.5 if settings.use_rslora else 8))
    assert read.alpha == (None if "alpha_pattern" in config else config.get("lora_alpha", 8))


# --- places of files ------------------------------------------------------------------------------------------------------


def test_a_folder_of_diffusers_and_one_file_are_read_alike(tmp_path: Path) -> None:
    save_file(factors(), tmp_path / DIFFUSERS_WEIGHTS)
    folder, file = read_checkpoint(str(tmp_path)), read_checkpoint(str(tmp_path / DIFFUSERS_WEIGHTS))
    assert folder.digest == file.digest == "sha256:" + hashlib.sha256((tmp_path / DIFFUSERS_WEIGHTS).read_bytes()).hexdigest()
    assert (folder.format, folder.modules.keys()) == ("diffusers", {"transformer.blocks.0.to_q"})


def test_the_configuration_beside_the_weights_of_a_peft_folder_counts_for_the_file_too() -> None:
    assert read_checkpoint(str(STRIPES / PEFT_WEIGHTS)).alpha == read_checkpoint(str(STRIPES)).alpha == 8


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        ({}, "InvalidAdapter", "found none of these"),
        ({"one.safetensors": b"", "two.safetensors": b""}, "InvalidAdapter", "found 2 .safetensors files"),
        ({"model.bin": b"x"}, "UnsupportedFormat", "model.bin; pickle can run code"),
        ({"one.safetensors": b"PK\x03\x04" + bytes(99)}, "UnsupportedFormat", "zip or PyTorch pickle"),
        ({"one.safetensors": b"\x80\x04\x95\x0b\x00\x00\x00\x00" + bytes(99)}, "UnsupportedFormat", "pickle"),
        ({"one.safetensors": b"<html><body>sign in" + bytes(99)}, "InvalidAdapter", "HTML"),
        ({"one.safetensors": b"version https://git-lfs.example/spec/v1"}, "InvalidAdapter", "git-lfs"),
    ],
)
def test_a_folder_without_one_adapter_is_refused(tmp_path: Path, files: dict[str, bytes], code: str, says: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    refused = refusal(tmp_path)
    assert (refused.code, says in refused.message) == (code, True), refused.message


def test_a_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", Path("/dev/zero"), tmp_path / "none", tmp_path / "a.ckpt", tmp_path / "zero\0byte"):
        assert refusal(path).code in (ErrorCode.INVALID_ADAPTER, ErrorCode.UNSUPPORTED_FORMAT)


def test_a_digest_that_is_not_the_files_is_refused_with_both() -> None:
    digest = read_checkpoint(str(STRIPES)).digest
    refused = refusal(STRIPES, digest="sha256:" + "0" * 64)
    assert refused.code is ErrorCode.DIGEST_MISMATCH
    assert digest in refused.message
    assert "0" * 64 in refused.message


# --- options of a load ----------------------------------------------------------------------------------------------------


def test_only_the_components_that_are_asked_for_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, factors() | factors("text_encoder.layers.0.q_proj"))
    assert len(read_checkpoint(path).modules) == 2
    kept = read_checkpoint(path, options=LoadOptions(components=["text_encoder"]))
    assert list(kept.modules) == ["text_encoder.layers.0.q_proj"]
    refused = refusal(path, components=["transformer", "vae"])
    assert refused.code is ErrorCode.NO_MATCHING_MODULES
    assert "no tensors for component vae, which was asked for, only for text_encoder, transformer" in refused.message


def test_both_denoisers_asked_for_together_are_those_that_the_file_has(tmp_path: Path) -> None:
    path = written(tmp_path, factors() | factors("text_encoder.layers.0.q_proj"))
    both = LoadOptions(components=["transformer", "transformer_2"])
    assert {module.partition(".")[0] for module in read_checkpoint(path, options=both).modules} == {"transformer"}
    only_second = LoadOptions(components=["transformer_2"])  # files give its modules the name of the first one
    assert list(read_checkpoint(path, options=only_second).modules) == ["transformer_2.blocks.0.to_q"]
    (tmp_path / "text").mkdir()
    text = written(tmp_path / "text", factors("text_encoder.layers.0.q_proj"))
    assert "for component transformer, transformer_2" in refusal(text, components=both.components).message


def test_another_rank_or_format_than_expected_is_refused_with_both(tmp_path: Path) -> None:
    path = written(tmp_path, factors() | factors("transformer.other", rank=3))
    assert read_checkpoint(path, options=LoadOptions(expected_rank=3, format="diffusers")).rank == 3
    refused = refusal(path, expected_rank=2)
    assert (refused.code, "expected 2 as the largest rank of its modules, found 3" in refused.message) == ("InvalidAdapter", True)
    refused = refusal(path, format="kohya")
    assert (refused.code, "expected tensor names in the format kohya, found diffusers" in refused.message) == ("UnsupportedFormat", True)


# --- names and alphas -----------------------------------------------------------------------------------------------------


def test_alphas_of_modules_count_each_for_its_own(tmp_path: Path) -> None:
    state = factors("transformer.a") | factors("transformer.b", rank=4) | factors("transformer.c")
    state |= {"transformer.a.alpha": torch.tensor(1.0), "transformer.b.alpha": torch.tensor([8])}
    read = read_checkpoint(written(tmp_path, state))
    assert {name: module.scaling for name, module in read.modules.items()} == {
        "transformer.a": 0.5,
        "transformer.b": 2.0,
        "transformer.c": 1.0,
    }
    assert read.alpha is None
    assert refusal(written(tmp_path, state | {"transformer.d.alpha": torch.tensor(1.0)})).message.endswith(
        "transformer.d has no lora_A, lora_B"
    )


def test_what_diffusers_writes_beside_the_tensors_counts_for_each_component(tmp_path: Path) -> None:
    settings = {"transformer.r": 2, "transformer.lora_alpha": 8, "text_encoder.r": 2, "text_encoder.lora_alpha": 3}
    state = factors() | factors("text_encoder.q_proj")
    read = read_checkpoint(written(tmp_path, state, {"lora_adapter_metadata": json.dumps(settings)}))
    assert [module.scaling for module in read.modules.values()] == [1.5, 4.0]
    refused = refusal(written(tmp_path, state, {"lora_adapter_metadata": json.dumps(settings | {"transformer.use_dora": True})}))
    assert (refused.code, "use_dora" in refused.message) == ("UnsupportedFormat", True)
    assert refusal(written(tmp_path, state, {"lora_adapter_metadata": "{"})).code is ErrorCode.INVALID_ADAPTER


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lora_unet_x.dora_scale", "DoRA"),
        ("transformer.x.lora_magnitude_vector", "DoRA"),
        ("lora_unet_x.lokr_w1", "LoKr"),
        ("lora_unet_x.hada_w1_a", "LoHa"),
        ("lora_unet_x.lora_mid.weight", "Tucker"),
        ("diffusion_model.blocks.0.norm3.diff", "difference of a weight"),
        ("diffusion_model.blocks.0.ffn.0.diff_b", "difference of a bias"),
        ("transformer.x.lora_B.bias", "with biases"),
        ("transformer.x.lora_embedding_A", "embedding"),
        ("lora_unet_x.oft_blocks", "OFT"),
        ("lora_unet_x.on_input", "IA3"),
    ],
)
def test_a_kind_that_is_no_plain_lora_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    refused = refusal(written(tmp_path, factors() | {name: torch.ones(2)}))
    assert refused.code is ErrorCode.UNSUPPORTED_FORMAT
    assert kind in refused.message
    assert name in refused.message


def test_factors_stay_in_the_files_own_type_but_for_double_precision(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        module = only(read_checkpoint(written(tmp_path, factors(dtype=dtype))))
        assert module.a.dtype is module.b.dtype is dtype
    assert only(read_checkpoint(written(tmp_path, factors(dtype=torch.float64)))).a.dtype is torch.float32
    too_large = {name: tensor * 1e300 for name, tensor in factors(dtype=torch.float64).items()}
    assert "has values that are too large for F32" in refusal(written(tmp_path, too_large)).message


def only(checkpoint: LoRACheckpoint) -> Any:
    (module,) = checkpoint.modules.values()
    return module


# --- metadata -------------------------------------------------------------------------------------------------------------


def test_the_base_model_is_a_hint_out_of_the_metadata(tmp_path: Path) -> None:
    assert read_checkpoint(written(tmp_path, factors())).base_model is None
    assert read_checkpoint(written(tmp_path, factors(), {"ss_base_model_version": "sdxl_base\x1b[31m" + "x" * 999})).base_model == (
        "sdxl_base[31m" + "x" * 187
    )
    folder = changed_adapter(tmp_path, STRIPES, config={"base_model_name_or_path": "someone/model"})
    assert read_checkpoint(str(folder)).base_model == "someone/model"


def test_a_recipe_is_read_and_a_wrong_one_is_refused_with_its_field(tmp_path: Path) -> None:
    def with_recipe(text: str) -> str:
        return written(tmp_path, factors(), {"diffusion_recipe": text})

    text = '{"steps": 4, "guidanceScale": 1.0, "sigmas": [1.0, 0.9, 0.7, 0.3], "shift": 3.0}'
    assert read_checkpoint(with_recipe(text)).recipe == Recipe(4, 1.0, [1.0, 0.9, 0.7, 0.3], 3.0)
    assert read_checkpoint(written(tmp_path, factors())).recipe is None
    for wrong, field in {
        "{": "",
        '{"steps": 0}': "steps",
        '{"steps": 2, "sigmas": [1.0]}': "sigmas",
        '{"sigmas": [0.5, 0.7]}': "sigmas",
        '{"sigmas": []}': "sigmas",
        '{"guidanceScale": -1}': "guidanceScale",
        '{"shift": "3"}': "shift",
        '{"shift": 0}': "shift",
        '{"flavour": 1}': "flavour",
    }.items():
        refused = refusal(with_recipe(wrong))
        assert (refused.code, field in refused.message) == ("InvalidAdapter", True), refused.message


# --- the header -----------------------------------------------------------------------------------------------------------


def header(tmp_path: Path, document: str, data: int = 0, *, length: int | None = None) -> str:
    """Write a safetensors file from the text of a header, which may be malformed, and `data` zero bytes; return its path.

    `length` may state a false size of the header.
    """
    text = document.encode()
    path = tmp_path / "made.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return str(path)


def entry(name: str, shape: list[int], begin: int, end: int, dtype: str = "F32") -> str:
    return f'"{name}": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'


@pytest.mark.parametrize(
    ("document", "data", "says"),
    [
        ("{ ", 0, "its header is not JSON"),
        ("[]", 0, "expected a JSON object as its header, found []"),
        ("[" * 30_000, 0, "its header is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", 0, "its header is not JSON"),
        ("[" + "[]," * 300_000 + "1]", 0, "more objects or lists than 20000 tensors need"),
        ("{" + ",".join(f'"{number}":{{}}' for number in range(20_001)) + "}", 0, "more objects or lists"),
        ('{"__metadata__": {"a": 1}}', 0, "__metadata__: invalid JSON in header: invalid type: integer `1`, expected a string"),
        ('{"__metadata__": {"a": "1", "a": "1"}}', 0, "__metadata__: its header has the name a twice"),
        ('{"__metadata__": {}, "__metadata__": {}}', 0, "its header has the name __metadata__ twice"),
        ('{"a": 3}', 0, "a: expected dtype, shape and data_offsets in the header, found 3"),
        ('{"a": ["F32", [2], [0, 8]]}', 8, "a: expected dtype, shape and data_offsets in the header, found ["),
        (
            "{" + entry("a", [2], 0, 8)[:-1] + ', "extra": 1}}',
            8,
            "a: expected dtype, shape and data_offsets in the header, found {'dtype': 'F32'",
        ),
        ("{" + entry("a", [2], 0, 8) + ", " + entry("a", [2], 0, 8) + "}", 8, "its header has the name a twice"),
        (
            "{" + entry("a", [2], 0, 8).replace("e", "\\u0065") + ", " + entry("\\u0061", [2], 0, 8) + "}",
            8,
            "its header has the name a twice",
        ),
        ("{" + entry("a", [2], 0, 8, "F33") + "}", 8, "a: invalid JSON in header: unknown variant `F33`"),
        ("{" + entry("b", [2], 0, 8) + ", " + entry("a", [2], 8, 15) + "}", 15, "a: invalid shape, data type, or offset"),
        ("{" + entry("a", [-2], 0, 8) + "}", 8, "a: invalid JSON in header: invalid value: integer `-2`"),
        ("{" + entry("a", [1 << 62, 1 << 62], 0, 8) + "}", 8, "a: overflow computing buffer size"),
        ("{" + entry("a", [0, 1 << 62], 0, 0) + "}", 0, "a: expected a shape of at most 8 dimensions"),
        ("{" + entry("a", [1] * 9, 0, 4) + "}", 4, "a: expected a shape of at most 8 dimensions, each at most 17179869184, found [1, 1"),
        ("{" + entry("a", [2], 0, 8) + ", " + entry("b", [2], 4, 12) + "}", 12, "invalid offset for tensor `b`"),
        ("{" + entry("a", [2], 0, 8) + ", " + entry("b", [2], 16, 24) + "}", 24, "invalid offset for tensor `b`"),
        ("{" + entry("a", [2], 0, 8) + "}", 4, "found 73 bytes: its last tensor, a, ends at byte 77"),
        ("{" + entry("a", [2], 0, 8) + "}", 12, "found 81 bytes: its last tensor, a, ends at byte 77"),
        ("{" + entry("../../etc/passwd", [2], 0, 8) + "}", 8, "cannot be a tensor's name"),
        ("{" + entry("a\\u001b[31m", [2], 0, 8) + "}", 8, "cannot be a tensor's name"),
        ("{" + entry("a" * 600, [2], 0, 8) + "}", 8, "cannot be a tensor's name"),
        ("{" + entry("a", [2], 0, 8, "\\u001b[31m" + "x" * 600) + "}", 8, "unknown variant `\\x1b[31m"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_first_tensor(tmp_path: Path, document: str, data: int, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_header(header(tmp_path, document, data), name="style")
    assert refused.value.code is ErrorCode.INVALID_ADAPTER
    assert says in refused.value.message
    assert len(refused.value.message) < 1000
    assert "\x1b" not in refused.value.message


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_length_than_it_claims_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(RequestError, match="header"):
        read_header(header(tmp_path, "{}", 100, length=length))


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = Path(header(tmp_path, "{}", length=17 << 20))
    with path.open("r+b") as file:
        file.truncate(18 << 20)
    with pytest.raises(RequestError, match="over the limit of 16777216"):
        read_header(path)


def test_a_length_that_looks_like_a_page_or_a_pickle_is_still_a_length(tmp_path: Path) -> None:
    for length in (ord("<"), 0x0280):
        assert read_header(header(tmp_path, "{}".ljust(length))).tensors == {}
