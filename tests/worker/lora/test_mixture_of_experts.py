# SPDX-License-Identifier: Apache-2.0
"""Adapters on a mixture of experts, whose layers see tokens and not the rows of a call: a tiny HiDream of diffusers."""

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from support.families.images import latent_images
from support.families.rig.family import as_tensor, in_float64
from support.families.rig.family_rig import Asked, FamilyRig
from support.lora.adapters import write_adapter
from support.runner.parallel_scenarios import block_linears

HIDREAM = next(family for family in latent_images.FAMILIES if family.name == "HiDreamImagePipeline")
FAMILY = replace(HIDREAM, output_type="latent")
STEPS, GUIDANCE = 2, 5.0


def arguments(seed: int) -> dict[str, Any]:
    own = in_float64(FAMILY.request(seed, STEPS, GUIDANCE))
    return own | {"generator": torch.Generator().manual_seed(seed), "output_type": "latent"}


@pytest.mark.slow
def test_experts_have_the_adapters_of_their_own_request_alone_and_beside_requests_with_others_or_none(tmp_path: Any) -> None:
    rig = FamilyRig(FAMILY, torch.float64)
    assert rig.runner.loras is not None
    linears = block_linears(FAMILY.build().transformer)
    assert any(".experts." in name for name in linears)
    folders = {number: tmp_path / str(number) for number in (1, 2)}
    for number, folder in folders.items():
        folder.mkdir()
        write_adapter(folder, linears, seed=number)
        rig.runner.loras.add_adapter(LoRARequest(f"adapter-{number}", number, str(folder)))
    for chosen in ([1], [1, 1], [1, 2], [1, 0], [0, 0]):
        asked = [Asked(seed, STEPS, GUIDANCE, loras=[LoRAUse(number, 1.0)] if number else []) for seed, number in enumerate(chosen)]
        # A call whose rows have different adapters fails, and each of its requests then makes the call alone.
        made, errors = rig.outcome(*asked)
        assert errors == {}
        for seed, number in enumerate(chosen):
            expected = as_tensor(FAMILY.call(with_peft(folders.get(number)), arguments(seed)))
            torch.testing.assert_close(made[str(seed)].double(), expected.double(), atol=1e-9, rtol=1e-9)
        # Rows of two requests, with both branches of guidance, share the call if their adapters are the same.
        rows = [call.rows for call in rig.denoiser_calls()]
        assert rows[-1] == (2 * len(chosen) if len(set(chosen)) == 1 else 2), (chosen, rows)


def with_peft(folder: Any) -> Any:
    """Build the family's pipeline without the worker, with transformer and VAE in float64.

    peft injects the adapter of `folder`, which must have rank and alpha 4; None gives the plain model.
    """
    pipeline = FAMILY.build()
    if folder is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        names = sorted({key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors})
        model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=names, r=4, lora_alpha=4), pipeline.transformer)
        peft.set_peft_model_state_dict(model, {key.removeprefix("base_model.model."): value for key, value in tensors.items()})
        model.eval()
    for part in (pipeline.transformer, pipeline.vae):
        part.to(torch.float64)
    return pipeline
