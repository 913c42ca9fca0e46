# SPDX-License-Identifier: Apache-2.0
"""Adapters on a rank: equal to peft, per row, refused whole when they do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.pipeline import load_pipeline
from runner_rig import RunnerRig, picture_of_diffusers, request
from worker_process import DIGITS

STRIPES, FRAME, PAPER = (DIGITS / "loras" / name for name in ("stripes", "frame", "paper"))


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    rig = RunnerRig(max_loras=2, max_lora_rank=16)
    assert rig.runner.loras is not None
    for number, folder in enumerate([STRIPES, FRAME], start=1):
        rig.runner.loras.add_adapter(LoRARequest(folder.name, number, str(folder)))
    return rig


def with_peft(rig: RunnerRig, folder: Path, scale: float = 1.0) -> Any:
    """The plain pipeline with an adapter in peft's own layers."""
    pipeline = load_pipeline(rig.config, torch.float32)
    pipeline.transformer = peft.PeftModel.from_pretrained(pipeline.transformer, str(folder)).base_model.model
    for module in pipeline.transformer.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling = {name: value * scale for name, value in module.scaling.items()}
    return pipeline


def levels_apart(one: Any, other: Any) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.parametrize(("folder", "number", "scale"), [(STRIPES, 1, 1.0), (FRAME, 2, 0.5)])
def test_a_picture_with_an_adapter_equals_the_one_of_peft(rig: RunnerRig, folder: Path, number: int, scale: float) -> None:
    spec = request("styled", loras=[LoRAUse(number, scale)])
    pictures, _ = rig.run(spec)
    assert levels_apart(pictures["styled"], picture_of_diffusers(with_peft(rig, folder, scale), spec)) <= 1


def test_different_adapters_and_none_share_a_step_and_each_row_has_its_own(rig: RunnerRig) -> None:
    specs = [request("base"), request("stripes", loras=[LoRAUse(1, 1.0)]), request("frame", loras=[LoRAUse(2, 1.0)])]
    alone = {spec.request_id: rig.run(spec)[0][spec.request_id] for spec in specs}
    together, _ = rig.run(*specs)
    assert [call.rows for call in rig.denoiser_calls()] == [6, 6, 6]
    for name, picture in together.items():
        assert levels_apart(picture, alone[name]) <= 1
        others = [levels_apart(picture, other) for other_name, other in alone.items() if other_name != name]
        assert min(others) > 3


def test_a_prompt_is_encoded_once_for_all_adapters_for_none_of_them_changes_a_text_encoder(rig: RunnerRig) -> None:
    prompt = "a digit that was not asked for before"
    rig.run(request("base", prompt=prompt, steps=1))
    assert [call.rows for call in rig.parallel.calls if call.component == "text_encoder"]
    rig.run(request("styled", prompt=prompt, steps=1, loras=[LoRAUse(1, 1.0)]))
    assert not [call for call in rig.parallel.calls if call.component == "text_encoder"]
    loras = rig.runner.loras
    assert loras is not None
    assert loras.identity_in("text_encoder", [LoRAUse(1, 1.0)]) is None
    # Where some do change a module, they are told by their digests and their strengths.
    uses: list[list[LoRAUse]] = [[], [LoRAUse(1, 1.0)], [LoRAUse(1, 0.5)], [LoRAUse(2, 1.0)], [LoRAUse(1, 1.0), LoRAUse(2, 1.0)]]
    assert len({loras.identity_in("transformer", each) for each in uses}) == 5


def test_an_adapter_at_strength_zero_is_the_base(rig: RunnerRig) -> None:
    pictures, _ = rig.run(request("base"), request("zero", loras=[LoRAUse(1, 0.0)]))
    np.testing.assert_array_equal(pictures["base"], pictures["zero"])


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
    pictures, errors = rig.run(request("stale", loras=[LoRAUse(99, 1.0)]))
    assert pictures == {}
    assert errors["stale"].code == "AdapterNotLoaded"


def test_an_adapter_over_the_capacity_of_the_host_is_refused_and_changes_nothing() -> None:
    manager = RunnerRig(max_loras=1, max_cached_loras=1).runner.loras
    assert manager is not None
    manager.add_adapter(LoRARequest("stripes", 1, str(STRIPES)))
    manager.add_adapter(LoRARequest("frame", 2, str(FRAME)), LoadOptions(evict=[]))  # as a new version beside an old one
    with pytest.raises(RequestError) as refused:
        manager.add_adapter(LoRARequest("paper", 3, str(PAPER)), LoadOptions(evict=[]))
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    assert manager.list_adapters() == [1, 2]


# --- what is refused ------------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, *, config: dict[str, Any] | None = None, tensors: Any = None) -> Path:
    """A copy of an adapter with another configuration or other tensors."""
    settings = json.loads((STRIPES / "adapter_config.json").read_text()) | (config or {})
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    state = load_file(STRIPES / "adapter_model.safetensors")
    save_file(tensors(state) if tensors else state, tmp_path / "adapter_model.safetensors")
    return tmp_path


def first_key(state: dict[str, torch.Tensor], part: str) -> str:
    return next(key for key in sorted(state) if f"lora_{part}" in key)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["proj_out"]}, "modules_to_save"),
        ({"lora_alpha": None}, "lora_alpha None"),
    ],
)
def test_a_kind_of_adapter_that_would_not_be_applied_exactly_is_refused_by_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        read_checkpoint(str(changed(tmp_path, config=config)))
    assert refused.value.code is ErrorCode.INVALID_ADAPTER


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (lambda state: {}, "none at all"),
        (lambda state: state | {"stranger": torch.ones(2)}, "stranger"),
        (lambda state: {key: value for key, value in state.items() if key != first_key(state, "B")}, "lora_A only"),
        (lambda state: state | {first_key(state, "A"): torch.full_like(state[first_key(state, "A")], torch.nan)}, "not finite"),
        (lambda state: state | {first_key(state, "A"): torch.ones(3, 128)}, "ranks do not meet"),
    ],
)
def test_weights_that_are_no_lora_are_refused_with_the_first_wrong_name(tmp_path: Path, tensors: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_checkpoint(str(changed(tmp_path, tensors=tensors)))


def test_a_digest_that_is_not_the_files_is_refused_with_both(tmp_path: Path) -> None:
    digest = read_checkpoint(str(STRIPES)).digest
    with pytest.raises(RequestError, match=digest) as refused:
        read_checkpoint(str(STRIPES), expected_digest="sha256:" + "0" * 64)
    assert refused.value.code is ErrorCode.DIGEST_MISMATCH
    assert "0" * 64 in refused.value.message


def test_an_adapter_for_another_model_is_refused_with_the_modules_that_do_not_match(rig: RunnerRig, tmp_path: Path) -> None:
    folder = changed(tmp_path, tensors=lambda state: {key.replace("transformer_blocks", "blocks"): value for key, value in state.items()})
    manager = rig.runner.loras
    assert manager is not None
    with pytest.raises(RequestError, match=r"do not match SD3Transformer2DModel.*: transformer\.blocks\.0.*no such linear layer"):
        manager.add_adapter(LoRARequest("other", 5, str(folder)))
    assert manager.list_adapters() == [1, 2]


def test_an_adapter_of_a_rank_over_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    manager = RunnerRig(max_lora_rank=4).runner.loras
    assert manager is not None
    with pytest.raises(RequestError, match="rank 8 is over the limit of 4"):
        manager.add_adapter(LoRARequest("stripes", 1, str(STRIPES)))


def test_alpha_and_rank_patterns_and_rank_stabilised_scaling_are_as_in_peft(rig: RunnerRig, tmp_path: Path) -> None:
    folder = changed(tmp_path, config={"use_rslora": True, "alpha_pattern": {"to_q": 3}})
    read = read_checkpoint(str(folder))
    model = with_peft(rig, folder).transformer
    for name, factors in read.modules.items():
        layer = model.get_submodule(name.removeprefix("transformer."))
        expected = layer.get_delta_weight("default")
        torch.testing.assert_close(factors.scaling * factors.b.float() @ factors.a.float(), expected, atol=1e-6, rtol=1e-5)
