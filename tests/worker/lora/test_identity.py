# SPDX-License-Identifier: Apache-2.0
"""The identity of an adapter: different effects and different converters have different identities."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint
from diffusion_worker.lora.identity import CONVERTER_VERSION, LOW_RANK, ModuleChange, contradicts, identity_of, identity_of_several
from diffusion_worker.lora.located import CONFIG_FILE, PEFT_WEIGHTS
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.messages import AdapterIdentity
from support.lora.files import CASES, Case, make_file, model_of

DIGEST = "sha256:" + "0" * 64
CHANGES = [ModuleChange("transformer.a", LOW_RANK, 4, 2.0), ModuleChange("text_encoder.b", LOW_RANK, 2, 1.0)]
# A hash of each converted file, by the converter's version and the naming of the file. If a file is converted differently, raise
# CONVERTER_VERSION and add a line: identities pinned before are of the earlier version.
GOLDEN = {
    (1, "SDXL, Kohya"): "15722ee5c54995e79f891e6c05d4b508",
    (1, "Flux 2, Kohya"): "c8fb05124f7e8761a178ea4419fd76a0",
    (1, "Wan, original"): "7dd4a655c039cebc3bab603b6fea6170",
}


def folder(path: Path, **settings: Any) -> str:
    """Write a peft folder whose weights are the same for all settings; return its path."""
    path.mkdir(exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8, **settings}))
    tensors = {f"base_model.model.{name}.lora_{part}.weight": torch.ones(2, 2) for name in ("one", "two") for part in "AB"}
    save_file(tensors, path / PEFT_WEIGHTS)
    return str(path)


def converted(checkpoint: LoRACheckpoint) -> str:
    """Return a hash of everything that was converted from a file."""
    found = hashlib.sha256()
    for name, factors in sorted(checkpoint.modules.items()):
        found.update(f"{name} {factors.scaling.hex()} {tuple(factors.a.shape)} {tuple(factors.b.shape)}\n".encode())
        for tensor in (factors.a, factors.b):
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def test_the_identity_is_written_with_the_version_of_the_converter() -> None:
    assert identity_of(DIGEST, CHANGES).startswith(f"v{CONVERTER_VERSION}:")
    assert identity_of(DIGEST, CHANGES) == identity_of(DIGEST, CHANGES[::-1])
    # Operators pin the identity, so it stays the same for one version of the converter.
    assert identity_of(DIGEST, CHANGES, converter=1) == "v1:5163fbb0f3443c06cfd24f39ca4726a0e85ed3235ca173e4db2ca59f7c0a3e81"


@pytest.mark.parametrize(
    ("digest", "changes", "converter"),
    [
        ("sha256:" + "1" * 64, CHANGES, 1),
        (DIGEST, CHANGES[:1], 1),
        (DIGEST, [CHANGES[0]._replace(rank=8), CHANGES[1]], 1),
        (DIGEST, [CHANGES[0]._replace(kind="dora"), CHANGES[1]], 1),
        (DIGEST, [CHANGES[0]._replace(module="transformer_2.a"), CHANGES[1]], 1),
        (DIGEST, [CHANGES[0]._replace(scaling=math.nextafter(2.0, 3.0)), CHANGES[1]], 1),
        (DIGEST, CHANGES, 2),
    ],
)
def test_each_part_of_an_effect_changes_the_identity(digest: str, changes: list[ModuleChange], converter: int) -> None:
    assert identity_of(digest, changes, converter=converter) != identity_of(DIGEST, CHANGES, converter=1)


def test_several_adapters_are_the_same_in_any_order_and_others_at_another_strength() -> None:
    one, two = AdapterIdentity("v1:1"), AdapterIdentity("v1:2")
    assert identity_of_several([(one, 0.5), (two, 1.0)]) == identity_of_several([(two, 1.0), (one, 0.5)])
    assert identity_of_several([(one, 0.5)]) != identity_of_several([(one, math.nextafter(0.5, 1.0))])
    assert identity_of_several([]) is None


def test_identities_of_two_converters_do_not_contradict_each_other() -> None:
    assert contradicts("v1:a", "v1:b")
    assert not contradicts("v1:a", "v1:a") and not contradicts("v2:a", "v1:b") and not contradicts("v1:a", None)


@pytest.mark.parametrize("settings", [{"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"two": 3}}])
def test_one_file_with_two_configurations_has_one_digest_and_two_identities(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = (read_checkpoint(folder(tmp_path / name, **given)) for name, given in (("a", {}), ("b", settings)))
    assert first.digest == second.digest and first.identity != second.identity


def test_an_adapter_whose_configuration_was_changed_is_refused_where_its_identity_is_demanded(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    expected = read_checkpoint(path).identity
    folder(tmp_path / "a", lora_alpha=32)
    with pytest.raises(
        RequestError, match=r"adapter 'style': expected identity v1:.*its configuration, such as lora_alpha, was changed"
    ) as refused:
        read_checkpoint(path, name="style", options=LoadOptions(identity=expected))
    assert refused.value.code is ErrorCode.IDENTITY_MISMATCH
    assert read_checkpoint(path, options=LoadOptions(identity=expected.replace("v1:", "v0:"))).rank == 2


@pytest.mark.parametrize("case", [case for case in CASES if (1, case.name) in GOLDEN], ids=lambda case: case.name)
def test_a_golden_file_is_converted_as_this_version_of_the_converter_always_did(case: Case, tmp_path: Path) -> None:
    pipeline = case.build()
    made = converted(read_checkpoint(str(make_file(case, pipeline, tmp_path).path), model=model_of(pipeline)))
    assert made == GOLDEN.get((CONVERTER_VERSION, case.name)), "converted to something else: raise CONVERTER_VERSION"
