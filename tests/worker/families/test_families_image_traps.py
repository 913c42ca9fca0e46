# SPDX-License-Identifier: Apache-2.0
"""Image families where merging rows goes wrong without an error: requests that must not share a call, and those that may.

Each test mixes requests that a careless merge takes for alike, in float64, and compares each with itself alone.
"""

import functools

import pytest
import torch

from diffusion_worker.runner.model_call.call import group_key, slice_rows
from support.families.images import flux, flux2, latent_images, qwen, worded_images, z_image
from support.families.rig.family import Arguments, Family, image, seeded
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.sample import sample

pytestmark = pytest.mark.slow

FAMILIES = {family.name: family for module in (flux, flux2, latent_images, qwen, worded_images, z_image) for family in module.FAMILIES}


@functools.cache
def rig_of(name: str) -> FamilyRig:
    family: Family = FAMILIES[name]
    return FamilyRig(family, torch.float64)


def most_rows_together(name: str, *changes: Arguments) -> int:
    """Run requests that differ by `changes` and check that each equals itself alone; return the rows of the largest denoiser call."""
    rig = rig_of(name)
    requests = [Asked(seed, 2, 5.0, changes=change) for seed, change in enumerate(changes, start=1)]
    alone = [rig.alone(asked) for asked in requests]
    for one, other in zip(rig.together(*requests), alone, strict=True):
        assert apart(one, other) <= 1e-9
    return max(call.rows for call in rig.denoiser_calls())


def sized(width: int, height: int) -> Arguments:
    return {"width": width, "height": height}


# Each reads positions in its own way.
PROPORTIONS = [
    ("FluxPipeline", sized(32, 16), sized(16, 32)),
    ("Flux2Pipeline", sized(128, 64), sized(64, 128)),
    ("Flux2KleinPipeline (distilled)", sized(128, 64), sized(64, 128)),
    ("QwenImagePipeline", sized(32, 16), sized(16, 32)),
    ("OvisImagePipeline", sized(32, 16), sized(16, 32)),
    ("Krea2Pipeline", sized(32, 16), sized(16, 32)),
    ("NucleusMoEImagePipeline", sized(32, 16), sized(16, 32)),
    ("QwenImage21Pipeline (without cache)", sized(128, 64), sized(64, 128)),
]


@pytest.mark.parametrize(("name", "wide", "high"), sample(PROPORTIONS, 4), ids=lambda value: value if isinstance(value, str) else "")
def test_images_of_one_area_and_other_proportions_share_no_call(name: str, wide: Arguments, high: Arguments) -> None:
    assert most_rows_together(name, wide, high) == 1
    assert most_rows_together(name, wide, wide) == 2


def test_flux_reads_positions_once_for_a_call_so_other_prompt_lengths_are_kept_apart() -> None:
    assert most_rows_together("FluxPipeline", {}, {"prompt_embeds": seeded(5, 1, 9, 16)}) == 1


def test_kontext_keeps_apart_requests_without_a_reference_and_with_one_of_another_size() -> None:
    without, with_one = {"image": None}, {}
    wide, high = {"image": image(5, 32, 16)}, {"image": image(6, 16, 32)}
    assert most_rows_together("FluxKontextPipeline", without, with_one, wide, high) == 1
    assert most_rows_together("FluxKontextPipeline", without, without, with_one, with_one) == 2


def test_flux_2_keeps_apart_references_that_differ_in_number_or_proportions() -> None:
    wide, high = image(5, 128, 64), image(6, 64, 128)
    one, other, both = {"image": [wide]}, {"image": [high]}, {"image": [wide, high]}
    turned = {"image": [high, wide]}
    assert most_rows_together("Flux2Pipeline (two references)", one, other, both, turned) == 1


def test_klein_that_caches_references_shares_calls_only_without_them() -> None:
    assert most_rows_together("Flux2KleinKVPipeline", {}, {}, {"image": [image(5, 64, 64)]}, {"image": [image(6, 64, 64)]}) == 2


def masked_text(valid: int, padded: int) -> Arguments:
    mask = torch.ones(1, padded, dtype=torch.int64)
    mask[:, valid:] = 0
    return {"prompt_embeds": seeded(valid, 1, padded, 16), "prompt_embeds_mask": mask}


def test_qwen_shares_calls_of_prompts_padded_to_one_length_and_no_others() -> None:
    assert most_rows_together("QwenImagePipeline", masked_text(4, 8), masked_text(7, 8)) == 2
    rig = rig_of("QwenImagePipeline")
    requests = [Asked(1, 2, 1.0, changes=masked_text(4, 8)), Asked(2, 2, 1.0, changes=masked_text(4, 5))]
    rig.together(*requests)
    assert {call.rows for call in rig.denoiser_calls()} == {1}


def test_qwen_edit_keeps_apart_references_of_other_proportions_and_results_of_other_sizes() -> None:
    square, wide = {"image": image(0)}, {"image": image(1, 64, 32)}
    assert most_rows_together("QwenImageEditPipeline", square, wide, {"height": 384, "width": 384}) == 1


def test_qwen_2_1_reads_where_images_are_in_the_prompt_from_row_0_so_other_places_are_kept_apart() -> None:
    rig = rig_of("QwenImage21Pipeline (without cache)")
    rig.together(Asked(1, 2, 1.0))
    call = rig.denoiser_calls()[0]
    other = call.arguments["img_mask"].clone()
    other[:, :2] = True
    call.arguments["img_mask"], before = other, group_key(call)
    assert before is not None
    assert group_key(call) not in (None, before)


def test_z_image_shares_calls_of_other_prompt_lengths_and_not_of_other_sizes() -> None:
    longer = {"prompt_embeds": [seeded(5, 40, 16)]}
    assert most_rows_together("ZImagePipeline", {}, longer) == 4
    assert most_rows_together("ZImagePipeline", sized(32, 16), sized(16, 32)) == 2


def test_the_control_of_z_image_is_padded_to_its_longest_row_so_other_prompt_lengths_are_kept_apart() -> None:
    longer = {"prompt_embeds": [seeded(5, 40, 16)]}
    assert most_rows_together("ZImageControlNetPipeline", {}, longer) == 2
    assert most_rows_together("ZImageControlNetPipeline", {}, {}) == 4


def test_rows_of_z_image_with_control_stay_on_one_rank_because_what_the_control_adds_is_as_long_as_its_longest_row() -> None:
    rig = rig_of("ZImageControlNetPipeline")
    rig.together(Asked(1, 2, 5.0, changes={"negative_prompt_embeds": [seeded(5, 40, 16)]}))
    control, denoiser = rig.denoiser_calls()[:2]
    assert control.whole
    assert denoiser.whole
    with pytest.raises(RuntimeError, match="must match"):
        rig.execute(slice_rows(denoiser, 0, 1))
    plain = rig_of("ZImagePipeline")
    plain.together(Asked(1, 2, 5.0, changes={"negative_prompt_embeds": [seeded(5, 40, 16)]}))
    assert not plain.denoiser_calls()[0].whole


def test_z_image_omni_asks_row_0_whether_there_are_references_so_requests_with_and_without_are_kept_apart() -> None:
    rig = rig_of("ZImageOmniPipeline")
    assert most_rows_together("ZImageOmniPipeline", {}, {"prompt_embeds": [[seeded(5, 40, 16)]]}) == 4
    call = rig.denoiser_calls()[0]
    before, seen = group_key(call), seeded(6, 4, 4, 8)
    call.arguments["x"] = [[seeded(7, 4, 1, 8, 8), *row] for row in call.arguments["x"]]
    call.arguments["siglip_feats"] = [[seen, None] for _ in call.arguments["siglip_feats"]]
    assert before is not None
    assert group_key(call) not in (None, before)


def test_ernie_pads_texts_itself_so_only_one_padded_length_shares_a_call() -> None:
    longer, shorter = (
        {"prompt_embeds": [seeded(5, 9, 16)]},
        {"prompt_embeds": [seeded(6, 5, 16)], "negative_prompt_embeds": [seeded(7, 6, 16)]},
    )
    assert most_rows_together("ErnieImagePipeline", {}, longer) == 2
    assert most_rows_together("ErnieImagePipeline", {}, shorter) == 4


def test_fibo_2_gives_each_row_as_many_tokens_as_its_own_text_asks_for() -> None:
    def text(valid: int) -> Arguments:
        return {"prompt_embeds": seeded(valid, 1, 2, 8, 16), "prompt_embeds_mask": torch.arange(8)[None] < valid}

    assert most_rows_together("BriaFibo2Pipeline", text(2), text(7)) == 2


def test_glm_image_with_a_reference_image_shares_no_call() -> None:
    reference = {
        "image": [image(5, 16, 16)],
        "prior_token_image_ids": [torch.arange(16)],
        "source_image_grid_thw": [torch.tensor([[1, 4, 4]])],
    }
    assert most_rows_together("GlmImagePipeline", {}, {}, reference, reference) == 2


def test_the_experts_of_nucleus_choose_from_each_row_by_itself() -> None:
    assert most_rows_together("NucleusMoEImagePipeline", {}, {}, {}) == 3


def test_omnigen_reads_positions_from_row_0_so_prompts_of_other_lengths_are_kept_apart() -> None:
    assert most_rows_together("OmniGenPipeline", {"prompt": "a fox"}, {"prompt": "two birds on a roof"}) == 2
    assert most_rows_together("OmniGenPipeline", {"prompt": "a fox"}, {"prompt": "a cat"}) == 4


def test_omnigen_says_by_row_numbers_where_images_go_so_requests_with_images_run_alone() -> None:
    rig = rig_of("OmniGenPipeline")
    rig.together(Asked(1, 2, 5.0))
    call = rig.denoiser_calls()[0]
    assert group_key(call) is not None
    call.arguments["input_image_sizes"] = {0: [[3, 7]]}
    assert group_key(call) is None


def test_bria_makes_one_table_of_positions_for_both_prompts_so_other_proportions_are_kept_apart() -> None:
    assert most_rows_together("BriaPipeline", sized(32, 16), sized(16, 32)) == 2
    assert most_rows_together("BriaPipeline", sized(32, 16), sized(32, 16)) == 4


def test_hunyuan_image_sorts_each_rows_texts_by_its_own_masks() -> None:
    def texts(valid: int, written: int) -> Arguments:
        return {"prompt_embeds_mask": torch.arange(6)[None] < valid, "prompt_embeds_mask_2": torch.arange(6)[None] < written}

    assert most_rows_together("HunyuanImagePipeline", texts(3, 6), texts(6, 2), texts(1, 1)) == 3


def test_cogview4_takes_crops_and_sizes_row_by_row_and_latents_of_one_shape() -> None:
    cropped = {"original_size": (64, 32), "crops_coords_top_left": (4, 8)}
    assert most_rows_together("CogView4Pipeline", {}, cropped) == 2
    assert most_rows_together("CogView4Pipeline", sized(32, 16), sized(16, 32)) == 1


def test_prx_gives_each_row_its_own_time_and_mask() -> None:
    masked = {"prompt_attention_mask": torch.arange(6)[None] < 2}
    assert most_rows_together("PRXPipeline", {"num_inference_steps": 2}, {"num_inference_steps": 5} | masked) == 4


def test_longcat_pads_prompts_to_one_length_so_all_of_them_share_calls() -> None:
    assert most_rows_together("LongCatImagePipeline", {"prompt": "a fox"}, {"prompt": "two birds on a roof"}) == 2
