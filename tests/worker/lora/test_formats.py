# SPDX-License-Identifier: Apache-2.0
"""Adapter files of every family in every naming: the written updates are read, and the effect equals that in diffusers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from safetensors.torch import save_file

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.families.rig.all import FAMILIES
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.lora.files import CASES, Case, MadeFile, Update, flat, make_file, model_of, of_diffusers
from support.runner.rig import RunnerRig, image_of_diffusers, request

PROBES = 6
# A share of the largest output, for sums of three thousand products in float32.
TOLERANCE = 1e-5


FAST = {"SDXL, Kohya", "Flux 2, Kohya", "Wan, original"}


def ours(path: Path, pipeline: Any) -> tuple[dict[str, Update], str]:
    """Read a file with our reader; return the update of each module that it changes, and the name of its format."""
    read = read_checkpoint(str(path), model=model_of(pipeline))
    return {name: Update(part.a.flatten(1), part.b.flatten(1), part.scaling) for name, part in read.modules.items()}, read.format


def assert_same(found: dict[str, Update], expected: dict[str, Update]) -> None:
    """Assert that two adapters update the same modules, and that each update maps random inputs to equal outputs.

    They may differ by TOLERANCE of the largest value.
    """
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        inputs = torch.randn(update.a.shape[1], PROBES, generator=torch.Generator().manual_seed(3))
        outputs = update.of(inputs)
        worst = float((found[name].of(inputs) - outputs).abs().max())
        assert worst <= TOLERANCE * float(outputs.abs().max()), f"{name}: {worst} apart"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow) for case in CASES])
def test_every_module_of_a_file_gets_the_update_that_was_written(case: Case, tmp_path: Path) -> None:
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path)
    found, format = ours(made.path, pipeline)
    assert format == case.format
    assert_same(found, made.updates)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if not case.diffusers_refuses], ids=lambda case: case.name)
def test_diffusers_loads_the_same_updates_from_the_same_file(case: Case, tmp_path: Path) -> None:
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path, one_alpha=case.one_alpha)
    found, _ = ours(made.path, pipeline)
    pipeline.load_lora_weights(str(tmp_path), weight_name=made.path.name)
    expected = of_diffusers(pipeline)
    assert_same({name: update for name, update in found.items() if not case.lost(name)}, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"rank_pattern": {"to_q": 3}, "alpha_pattern": {"to_k": 5, "transformer_blocks.1.attn.to_v": 7}}]
)
def test_what_training_with_diffusers_saves_is_read_as_it_was_trained(options: dict[str, Any], tmp_path: Path) -> None:
    pipeline = case_named("SD3, diffusers").build()
    config = peft.LoraConfig(r=4, lora_alpha=10, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "ff.net.2"], **options)
    pipeline.transformer.add_adapter(config)
    pipeline.text_encoder.add_adapter(peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, target_modules=["q_proj"]))
    parts = {"transformer": pipeline.transformer, "text_encoder": pipeline.text_encoder}
    pipeline.save_lora_weights(
        tmp_path,
        **{f"{name}_lora_layers": peft.get_peft_model_state_dict(part, adapter_name="default") for name, part in parts.items()},
        **_collate_lora_metadata(parts),
    )
    trained = of_diffusers(pipeline)
    found, format = ours(tmp_path, case_named("SD3, diffusers").build())
    assert format == "diffusers"
    assert_same(found, trained)


# --- tensors that a conversion would drop ---------------------------------------------------------------------------------


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def refusal(path: Path, pipeline: Any) -> str:
    with pytest.raises(RequestError) as refused:
        read_checkpoint(str(path), name="style", model=model_of(pipeline))
    assert refused.value.code in (ErrorCode.INVALID_ADAPTER, ErrorCode.UNSUPPORTED_FORMAT)
    return refused.value.message


def rewritten(made: MadeFile, changes: dict[str, torch.Tensor | None]) -> Path:
    """Write the file again with some tensors replaced or added, where None removes one; return its path."""
    tensors = {name: tensor.contiguous() for name, tensor in (made.tensors | changes).items() if tensor is not None}
    save_file(tensors, made.path)
    return made.path


def test_two_modules_that_diffusers_makes_one_of_are_refused_with_the_one_it_would_drop(tmp_path: Path) -> None:
    case = dataclasses.replace(case_named("SDXL, Kohya"), table=flat("unet", "lora_unet_"))
    pipeline = case.build()
    message = refusal(make_file(case, pipeline, tmp_path).path, pipeline)
    assert "2 of 170 tensors have no place in the model: lora_unet_add_embedding_linear_1.lora_down.weight" in message


def test_tensors_of_another_naming_beside_the_first_are_refused(tmp_path: Path) -> None:
    case = case_named("Qwen-Image, diffusers")
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path)
    pair = {"lora_unet_x.lora_down.weight": torch.ones(2, 4), "lora_unet_x.lora_up.weight": torch.ones(4, 2)}
    read = read_checkpoint(str(rewritten(made, pair)), model=model_of(pipeline))
    assert "transformer.lora_unet_x" in read.modules  # no model has this module: its layers refuse it by that name


@pytest.mark.parametrize("part", [".lora_down.weight", ".lora_up.weight"])
def test_half_a_module_is_refused_by_its_name(tmp_path: Path, part: str) -> None:
    case = case_named("Wan, Kohya")
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path)
    name = "lora_unet_blocks_1_ffn_2"
    assert f"{name} has no lora_" in refusal(rewritten(made, {name + part: None}), pipeline)


def test_a_block_of_an_absurd_number_is_refused_before_anybody_counts_to_it(tmp_path: Path) -> None:
    case = case_named("Wan, original")
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path)
    name = "diffusion_model.blocks.999999999.ffn.0"
    path = rewritten(made, {f"{name}.lora_A.weight": torch.ones(2, 24), f"{name}.lora_B.weight": torch.ones(16, 2)})
    assert name in refusal(path, pipeline)


def test_an_alpha_below_zero_is_applied_as_it_is(tmp_path: Path) -> None:
    case = case_named("Flux 2, Kohya")
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path)
    found, _ = ours(rewritten(made, {"lora_unet_img_in.alpha": torch.tensor(-3.0)}), pipeline)
    assert found["transformer.x_embedder"].scaling == -1.5


def test_a_fused_projection_whose_parts_have_ranks_of_their_own_is_split_at_them(tmp_path: Path) -> None:
    case = case_named("Flux 2, Kohya")
    pipeline = case.build()
    made = make_file(case, pipeline, tmp_path, rank=6)
    name = "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"
    blocks = torch.block_diag(*(torch.ones(32, 2) * number for number in (1, 2, 3)))
    found, _ = ours(rewritten(made, {name: blocks}), pipeline)
    down, alpha = (made.tensors[name.replace("lora_up.weight", end)] for end in ("lora_down.weight", "alpha"))
    for number, part in enumerate(("to_q", "to_k", "to_v")):
        update = found[f"transformer.transformer_blocks.0.attn.{part}"]
        assert update.a.shape[0] == 2
        expected = alpha / 6 * blocks[32 * number : 32 * (number + 1)] @ down
        torch.testing.assert_close(update.scaling * update.b @ update.a, expected)


def test_names_of_an_original_model_are_refused_where_nothing_can_convert_them(tmp_path: Path) -> None:
    case = case_named("Wan, original")
    pipeline = case.build()
    path = make_file(case, pipeline, tmp_path).path
    with pytest.raises(RequestError, match="which this pipeline cannot convert") as refused:
        read_checkpoint(str(path), model=model_of(pipeline)._replace(convert=None))
    assert refused.value.code is ErrorCode.UNSUPPORTED_FORMAT


# --- images -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD 1.5, Kohya", "Qwen-Image, Kohya"])
def test_a_result_with_an_adapter_in_kohyas_naming_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    family = next(family for family in FAMILIES if family.name == {"SD": "StableDiffusionPipeline", "Qw": "QwenImagePipeline"}[name[:2]])
    rig = FamilyRig(family)
    assert rig.runner.loras is not None
    denoiser = model_of(rig.pipeline).denoiser
    made = make_file(dataclasses.replace(case, table=flat(denoiser, "lora_unet_")), rig.pipeline, tmp_path, one_alpha=True)
    save_file({key: tensor / 8 for key, tensor in made.tensors.items()}, made.path)
    base = rig.alone(Asked())
    rig.plain.load_lora_weights(str(tmp_path), weight_name=made.path.name)
    rig.runner.loras.add_adapter(LoRARequest("style", 1, str(made.path)))
    found = rig.together(Asked(loras=[LoRAUse(1, 1.0)]))
    assert apart(found[0], rig.alone(Asked())) < 1e-4
    assert apart(found[0], base) > 0.01


@pytest.mark.slow
def test_an_image_with_an_adapter_of_transformer_and_text_encoders_is_that_of_diffusers(tmp_path: Path) -> None:
    rig = RunnerRig(max_loras=2)
    assert rig.runner.loras is not None
    plain = load_pipeline(rig.config, torch.float32)
    case = case_named("SD3, diffusers")
    made = make_file(case, plain, tmp_path)
    save_file({key: (tensor / 16).half() for key, tensor in made.tensors.items() if ".proj." not in key}, made.path)
    loaded = rig.runner.loras.add_adapter(LoRARequest("style", 1, str(made.path)))
    assert loaded.components == ["text_encoder", "text_encoder_2", "transformer"]
    plain.load_lora_weights(str(tmp_path), weight_name=made.path.name)
    spec = request("styled", loras=[LoRAUse(1, 1.0)])
    images, errors = rig.run(spec, request("base"))
    assert not errors
    expected = image_of_diffusers(plain, spec)
    assert int(np.abs(images["styled"].astype(int) - expected.astype(int)).max()) <= 1
    assert int(np.abs(images["base"].astype(int) - expected.astype(int)).max()) > 8


def test_the_table_of_formats_has_every_case_that_is_proved_and_no_other() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "lora-formats.md").read_text().splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.endswith("|") and " written" in line]
    assert rows == [case.name for case in CASES]
