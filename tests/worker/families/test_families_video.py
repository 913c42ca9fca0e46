# SPDX-License-Identifier: Apache-2.0
"""Videos that silently go wrong when rows are merged: one test for each trap, named after it.

The general checks of every family are in `test_families.py` and `test_family_probes.py`; here each trap is set on purpose. All comparisons
are in float64, where rounding is far below the effect of a mistake.
"""

import functools
from typing import Any

import msgspec
import pytest
import torch

from diffusion_worker.runner.model_call.call import ModelCall, group_key, merge, split
from support.families.rig.all import FAMILIES
from support.families.rig.family import as_tensor
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.sample import sample

pytestmark = pytest.mark.slow

FIRST, SECOND = Asked(1, 2, 5.0), Asked(2, 2, 3.0)
# Requests at different steps in every tick that they share, if the second joins a tick later.
PAIR = (Asked(1, 3, 5.0), SECOND)
LATER = (0, 1)
# Rows of the calls of PAIR with two calls a step of a row each, guided and not.
TWO_CALLS_A_STEP = [1, 1, 2, 2, 2, 2]


@functools.cache
def rig_of(name: str) -> FamilyRig:
    (family,) = [family for family in FAMILIES if family.name == name]
    return FamilyRig(family, family.compared_in)


def changed(asked: Asked, **changes: Any) -> Asked:
    return Asked(asked.seed, asked.steps, asked.guidance, changes=changes)


def together_equals_alone(rig: FamilyRig, *requests: Asked, joining: tuple[int, ...] | None = None) -> list[int]:
    """Run the requests each alone and then merged, from the ticks in `joining` on, and compare within the family's tolerance.

    Return the rows of the merged denoiser calls.
    """
    alone = [rig.alone(asked) for asked in requests]
    results = rig.together(*requests, joining=joining)
    rows = [call.rows for call in rig.denoiser_calls()]
    assert max(map(apart, results, alone)) <= max(rig.family.tolerance, 1e-9)
    return rows


def first_call(rig: FamilyRig, asked: Asked) -> ModelCall:
    rig.together(asked)
    return rig.denoiser_calls()[0]


# Videos of other lengths. The argument has a name in each pipeline. In the model call the length is another shape of the latents, a
# number beside the tokens (LTX), or other positions (CogVideoX).
OF_ANOTHER_SHAPE = [
    ("WanPipeline", "num_frames", 9),
    ("SanaVideoPipeline", "frames", 9),
    ("LattePipeline", "video_length", 1),
    ("HunyuanVideoPipeline", "num_frames", 9),
]
LENGTHS = [*sample(OF_ANOTHER_SHAPE, 1), ("LTXPipeline", "num_frames", 9), ("CogVideoXPipeline", "num_frames", 17)]


@pytest.mark.parametrize(("name", "argument", "frames"), LENGTHS, ids=lambda value: str(value))
def test_videos_of_other_lengths_share_no_call_and_those_of_the_same_do(name: str, argument: str, frames: int) -> None:
    rig = rig_of(name)
    usual, longer, as_long = FIRST, changed(SECOND, **{argument: frames}), changed(Asked(3, 2, 4.0), **{argument: frames})
    one = first_call(rig, usual)
    assert group_key(one) != group_key(first_call(rig, longer))
    rows = together_equals_alone(rig, usual, longer, as_long)
    assert sorted(set(rows)) == [one.rows, 2 * one.rows]


def test_tokens_that_could_be_a_long_or_a_wide_video_are_not_taken_for_one_another() -> None:
    # LTX packs frames, height and width into one dimension. Two latent frames of 8 x 8 have as many tokens as one of 16 x 8.
    rig = rig_of("LTXPipeline")
    long, wide = changed(FIRST, num_frames=5), changed(SECOND, num_frames=1, height=64)
    assert first_call(rig, long).arguments["hidden_states"].shape == first_call(rig, wide).arguments["hidden_states"].shape
    assert set(together_equals_alone(rig, long, wide)) == {2}


def test_the_frame_rate_that_scales_positions_keeps_calls_apart() -> None:
    rig = rig_of("LTXPipeline")
    assert set(together_equals_alone(rig, FIRST, changed(SECOND, frame_rate=50))) == {2}
    assert set(together_equals_alone(rig, FIRST, SECOND)) == {4}


@pytest.mark.parametrize("name", ["WanPipeline (a time for each token)", "LTXImageToVideoPipeline"])
def test_a_time_for_each_token_stays_with_its_row(name: str) -> None:
    # From the second tick on the requests are at different steps, and so are their tokens.
    rig = rig_of(name)
    rows = together_equals_alone(rig, *PAIR, joining=LATER)
    assert max(rows) == 2 * rows[0]
    (largest, *_) = [call for call in rig.denoiser_calls() if call.rows == max(rows)]
    times = largest.arguments["timestep"]
    assert times.shape == (largest.rows, largest.arguments["hidden_states"].shape[1] if "LTX" in name else 8)
    assert len({tuple(row.tolist()) for row in times}) == 2


def test_a_row_with_an_image_and_one_without_share_no_call_in_hunyuan_video_15() -> None:
    # The transformer masks the image's tokens only if those of all rows are zero.
    rig = rig_of("HunyuanVideo15Pipeline")
    without, other = first_call(rig, FIRST), first_call(rig, SECOND)
    image = torch.randn_like(other.arguments["image_embeds"])
    shown = msgspec.structs.replace(other, arguments=other.arguments | {"image_embeds": image})
    assert group_key(without) == group_key(other)
    assert group_key(without) != group_key(shown)
    wrong, _ = split(rig.execute(merge([without, shown])), [1, 1])
    assert apart(as_tensor(wrong), as_tensor(rig.execute(without))) > 1e-3, "the trap is gone: the rule may go too"


def test_rotary_tables_with_as_many_positions_as_the_call_has_rows_are_no_rows() -> None:
    # Two latent frames of one patch are two positions, and guidance makes two rows.
    rig = rig_of("CogVideoXPipeline")
    small = {"num_frames": 5, "height": 16, "width": 16}
    call = first_call(rig, changed(FIRST, **small))
    assert call.arguments["image_rotary_emb"][0].shape[0] == call.rows == 2
    assert set(together_equals_alone(rig, changed(FIRST, **small), changed(SECOND, **small))) == {4}


def test_positions_of_a_single_frame_are_no_row() -> None:
    rig = rig_of("Kandinsky5T2VPipeline")
    call = first_call(rig, changed(FIRST, num_frames=1))
    assert call.arguments["visual_rope_pos"][0].shape == (1,) and call.rows == 1
    assert set(together_equals_alone(rig, changed(FIRST, num_frames=1), changed(SECOND, num_frames=1))) == {2}


def test_a_strength_for_each_control_block_is_no_row_and_keeps_calls_apart() -> None:
    rig = rig_of("WanVACEPipeline")
    one, other = first_call(rig, FIRST), first_call(rig, SECOND)
    pair = merge([one, other])
    assert pair.arguments["control_hidden_states_scale"].shape[0] == pair.rows == 2
    twice = rig.execute(merge([pair, pair]))
    assert apart(as_tensor(split(twice, [2, 2])[1]), as_tensor(rig.execute(pair))) <= 1e-9
    assert set(together_equals_alone(rig, FIRST, changed(SECOND, conditioning_scale=0.1))) == {1}


def test_one_padding_mask_for_the_whole_call_is_not_repeated_for_each_row() -> None:
    rig = rig_of("CosmosTextToWorldPipeline")
    rig.together(FIRST, SECOND)
    assert {(call.rows, call.arguments["padding_mask"].shape[0]) for call in rig.denoiser_calls()} == {(2, 1)}


def test_a_pipeline_that_steps_twice_with_one_prediction_takes_one_tick_a_step() -> None:
    assert together_equals_alone(rig_of("CosmosTextToWorldPipeline"), *PAIR, joining=LATER) == TWO_CALLS_A_STEP


def test_a_pipeline_with_a_scheduler_for_each_frame_takes_one_tick_a_step() -> None:
    assert together_equals_alone(rig_of("SkyReelsV2DiffusionForcingPipeline"), *PAIR, joining=LATER) == TWO_CALLS_A_STEP


def test_frame_rates_given_as_a_list_keep_calls_apart() -> None:
    rig = rig_of("SkyReelsV2DiffusionForcingPipeline")
    assert set(together_equals_alone(rig, FIRST, changed(SECOND, fps=16))) == {1}


def test_each_of_the_guided_calls_of_a_step_is_shared_with_its_like() -> None:
    # LTX 2 makes three calls: with and without prompt in one, one without a block, one that separates video and sound.
    rows = together_equals_alone(rig_of("LTX2Pipeline (guided three ways)"), *PAIR, joining=LATER)
    assert rows == [count for requests in (1, 2, 2) for count in (2 * requests, requests, requests)]


def test_a_step_goes_to_the_expert_of_its_noise_and_no_call_mixes_the_two() -> None:
    # Joining four ticks later, the second request is at high noise when the first is at low.
    rig = rig_of("WanPipeline (two experts)")
    together_equals_alone(rig, Asked(1, 6, 5.0), Asked(2, 6, 3.0), joining=(0, 4))
    assert {call.component for call in rig.denoiser_calls()} == {"transformer", "transformer_2"}
    high = [call.arguments["timestep"].min() for call in rig.denoiser_calls() if call.component == "transformer"]
    low = [call.arguments["timestep"].max() for call in rig.denoiser_calls() if call.component == "transformer_2"]
    assert min(high) > max(low)


def test_texts_of_other_lengths_under_one_padded_length_share_a_call() -> None:
    # With one row FramePack cuts the text to its length, with more it masks them.
    rig = rig_of("HunyuanVideoFramepackPipeline")
    masks = [first_call(rig, asked).arguments["encoder_attention_mask"].sum() for asked in (FIRST, SECOND)]
    assert masks[0] != masks[1]
    assert set(together_equals_alone(rig, FIRST, SECOND)) == {2}


def test_requests_at_other_sections_of_a_video_share_no_call() -> None:
    # FramePack makes the last section first; the second request joins when the first is at its second section.
    rig = rig_of("HunyuanVideoFramepackPipeline")
    two_sections = {"num_frames": 9}
    rows = together_equals_alone(rig, changed(FIRST, **two_sections), changed(SECOND, **two_sections), joining=(0, 2))
    assert rows == [1] * 8
    assert set(together_equals_alone(rig, changed(FIRST, **two_sections), changed(SECOND, **two_sections))) == {2}


def test_frames_of_two_videos_that_are_decoded_together_stay_in_their_video() -> None:
    # The frames of one video are rows of the VAE, which blends neighbouring ones.
    rig = rig_of("StableVideoDiffusionPipeline")
    together_equals_alone(rig, FIRST, SECOND)
    decodes = [call for call in rig.rank.calls if call.component == "vae" and call.method == "decode"]
    assert [(call.rows, call.arguments["num_frames"]) for call in decodes] == [(4, 2)]


def test_a_request_that_leaves_inside_a_cache_context_takes_the_context_with_it() -> None:
    # Every call of LTX is made inside a cache context, and the stand-in has to pass the context to the real transformer.
    rig = rig_of("LTXPipeline")
    results, errors = rig.outcome(Asked(1, 3, 5.0), changed(SECOND, height=33))
    assert list(results) == ["0"] and errors["1"].code == "InvalidRequest"
    assert rig.together(Asked(1, 3, 5.0))[0].equal(results["0"])
