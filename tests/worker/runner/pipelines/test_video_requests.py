# SPDX-License-Identifier: Apache-2.0
"""Requests for a video through a saved pipeline: from a prompt to the pixels of every frame."""

from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.body import PipelineBody
from diffusion_worker.runner.stepping.pixels import pixels_of
from support.families.rig.family import build_seeded
from support.families.rig.family_rig import FamilyRig
from support.families.rig.texts import letters, tiny_umt5
from support.families.videos import other_videos, wan
from support.runner.rig import RunnerRig, request


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> RunnerRig:
    """Save a tiny Wan, text encoder and tokenizer included, to a folder and load it from there as the worker does."""
    folder = tmp_path_factory.mktemp("wan")
    parts = {"text_encoder": lambda: tiny_umt5(wan.TRANSFORMER["text_dim"]), "tokenizer": letters}
    pipeline = build_seeded(lambda: wan.pipeline("WanPipeline", **{name: make() for name, make in parts.items()}))()
    pipeline.save_pretrained(folder)
    return RunnerRig(model=str(folder))


@pytest.fixture(scope="module")
def plain(rig: RunnerRig) -> Any:
    """Load the same Wan pipeline in float32 without a runner, for reference results."""
    return load_pipeline(rig.config, torch.float32)


def video(name: str, **fields: Any) -> RequestSpec:
    return request(name, **{"prompt": "a red cat runs kumquatfen", "frames": 5, "guidance_scale": 5.0, "steps": 2} | fields)


def frames_of_diffusers(pipeline: Any, spec: RequestSpec) -> np.ndarray[Any, np.dtype[np.uint8]]:
    made = pipeline(
        spec.prompt,
        negative_prompt=spec.negative_prompt,
        height=spec.height,
        width=spec.width,
        num_frames=spec.frames,
        num_inference_steps=spec.steps,
        guidance_scale=spec.guidance_scale,
        generator=torch.Generator().manual_seed(spec.seed),
        output_type="np",
    )
    return np.asarray((made.frames[0] * 255).round(), np.uint8)


def test_a_video_arrives_as_the_pixels_of_all_its_frames(rig: RunnerRig, plain: Any) -> None:
    spec = video("one", negative_prompt="blurred kumquatfen")
    images, errors = rig.run(spec)
    assert not errors
    assert images["one"].dtype == np.uint8
    assert images["one"].shape == (5, 32, 32, 3)
    np.testing.assert_array_equal(images["one"], frames_of_diffusers(plain, spec))


def test_videos_of_one_length_share_every_step_and_one_of_another_length_none(rig: RunnerRig, plain: Any) -> None:
    specs = [video("short"), video("as-short", prompt="a blue dog sleeps kumquatfen", seed=2), video("long", frames=9, seed=3)]
    images, errors = rig.run(*specs)
    assert not errors
    assert sorted(call.rows for call in rig.denoiser_calls()) == [1] * 4 + [2] * 4
    assert images["long"].shape == (9, 32, 32, 3)
    for spec in specs:
        assert np.abs(images[spec.request_id].astype(int) - frames_of_diffusers(plain, spec).astype(int)).max() <= 1


def test_a_single_frame_is_a_video_of_one_frame(rig: RunnerRig) -> None:
    images, _ = rig.run(video("still", frames=1))
    assert images["still"].shape == (1, 32, 32, 3)


def test_a_pipeline_that_returns_its_frames_bare_gives_all_of_them() -> None:
    # Without an output object, Stable Video Diffusion returns its frames bare and no tuple.
    family = other_videos.FAMILIES[-1]
    rig = FamilyRig(family)
    arguments = family.request(1, 2, 3.0)
    rig.runner.join(video("moves"), PipelineBody(rig.pipeline, arguments, seed=1))
    outputs = [rig.runner.execute_stepwise(Tick(number)) for number in range(3)]
    assert pixels_of(outputs[-1].images["moves"]).shape == (2, 16, 16, 3)
