# SPDX-License-Identifier: Apache-2.0
"""From a request to the pipeline's own call: its arguments, refusals, and the resulting pixels."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_worker.config import LoadFormat, RequestDefaults, RequestLimits
from diffusion_worker.engine.requests.admission import GenerationParams, check, with_defaults
from diffusion_worker.errors import ConfigError, RequestError
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.body import default_guidance, make_body
from diffusion_worker.runner.pipelines.description import describe
from diffusion_worker.runner.stepping.pixels import pixels_of, to_pixels
from support.families.rig.all import FAMILIES
from support.families.rig.family import image, mask
from support.runner.rig import RunnerRig, request
from support.worker.process import DIGITS_MODEL

pytestmark = pytest.mark.slow

BUILDERS = {family.name: family.build for family in FAMILIES}


def arguments_of(pipeline: Any, **fields: Any) -> dict[str, Any]:
    """Return the arguments, but for the prompt, with which the pipeline is called for a request with only these fields."""
    spec = RequestSpec(request_id="one", prompt="a digit kumquatfen", seed=1, **fields)
    return {name: value for name, value in make_body(pipeline, spec)._arguments.items() if name != "prompt"}


def without_loading(name: str) -> Any:
    """Return a pipeline of this class without components, because its arguments depend on the class only."""
    kind = type(name, (getattr(diffusers, name),), {"components": {}})
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("StableDiffusionPipeline", {"steps": 9, "height": 64, "width": 32}, {"num_inference_steps": 9, "height": 64, "width": 32}),
        ("WanPipeline", {"frames": 17}, {"num_frames": 17}),
        ("LattePipeline", {"frames": 8}, {"video_length": 8}),
        ("SanaVideoPipeline", {"frames": 9}, {"frames": 9}),
        ("FluxPipeline", {"guidance_scale": 3.0}, {"guidance_scale": 3.0}),
        ("QwenImagePipeline", {"guidance_scale": 3.0}, {"true_cfg_scale": 3.0, "negative_prompt": " "}),
        ("QwenImagePipeline", {"guidance_scale": 1.0}, {"true_cfg_scale": 1.0}),
        ("QwenImagePipeline", {}, {}),
        (
            "QwenImageEditPipeline",
            {"guidance_scale": 3.0, "negative_prompt": "x kumquatfen"},
            {"true_cfg_scale": 3.0, "negative_prompt": "x kumquatfen"},
        ),
        ("QwenImage21Pipeline", {"guidance_scale": 3.0}, {"true_cfg_scale": 3.0, "negative_prompt": " "}),
        ("HunyuanVideoPipeline", {"guidance_scale": 3.0}, {"guidance_scale": 3.0}),
        (
            "ChromaInpaintPipeline",
            {"guidance_scale": 3.0, "negative_prompt": "x kumquatfen"},
            {"guidance_scale": 3.0, "negative_prompt": "x kumquatfen"},
        ),
    ],
)
def test_a_request_becomes_the_arguments_that_the_class_has_for_it(name: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments_of(without_loading(name), **fields) == expected


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("StableDiffusionPipeline", {"frames": 9}, "frames"),
        ("StableDiffusionImg2ImgPipeline", {"height": 64, "width": 64}, "size"),
        ("ConsistencyModelPipeline", {}, "prompt"),
        ("AmusedPipeline", {"guidance_scale": 2.0, "frames": 2}, "frames"),
        ("UnCLIPPipeline", {"guidance_scale": 2.0}, "guidance_scale"),
        ("StableDiffusionLatentUpscalePipeline", {"height": 64}, "size"),
        ("FluxPipeline", {"negative_prompt": "stripes kumquatfen"}, "negative_prompt"),
        ("Flux2Pipeline", {"negative_prompt": "stripes kumquatfen"}, "negative_prompt"),
    ],
)
def test_what_the_class_does_not_take_is_refused_by_the_fields_name(name: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        arguments_of(without_loading(name), **fields)
    assert refused.value.code == "InvalidRequest"
    assert refused.value.details == {"field": field}
    assert refused.value.message.startswith(f"{field}: {name} ")


@pytest.mark.parametrize(
    ("name", "when"), [("FluxPipeline", "in every request"), ("QwenImagePipeline", "unless guidance_scale is above 1")]
)
def test_a_negative_prompt_that_would_be_ignored_is_refused_with_the_field_that_helps_if_one_does(name: str, when: str) -> None:
    with pytest.raises(RequestError, match=f"negative_prompt: {name} ignores one {when}$"):
        arguments_of(without_loading(name), guidance_scale=1.0, negative_prompt="stripes kumquatfen")


def test_a_conditioning_image_that_the_class_does_not_take_is_refused_by_its_name() -> None:
    pipeline = without_loading("StableDiffusion3Pipeline")
    with pytest.raises(RequestError, match=r"mask_image: StableDiffusion3Pipeline takes no such argument"):
        make_body(pipeline, request("one"), conditioning={"mask_image": mask(1)})


IMG2IMG = {"image": image(1), "strength": 0.5}
INPAINT = {"image": image(2), "mask_image": mask(2)}


def plain_image(plain: Any, spec: RequestSpec, conditioning: dict[str, Any]) -> Any:
    """Make an image with diffusers' own call for a request with input images, and return its values from 0 to 255, not rounded."""
    given = {} if spec.guidance_scale is None else {"guidance_scale": spec.guidance_scale}
    generator = torch.Generator().manual_seed(spec.seed)
    size = {"height": spec.height, "width": spec.width}
    steps = spec.steps
    return (
        plain(spec.prompt, num_inference_steps=steps, generator=generator, output_type="np", **size, **given, **conditioning).images[0]
        * 255
    )


def check_with_images(rig: RunnerRig, asked: list[tuple[RequestSpec, dict[str, Any]]]) -> None:
    """Run requests with input images together, assert that they share calls of four rows, and that each image is diffusers'."""
    plain = load_pipeline(rig.config, torch.float32)
    images: dict[str, Any] = {}
    for spec, conditioning in asked:
        rig.runner.join(spec, make_body(rig.runner.pipeline, spec, conditioning=conditioning))
    for tick in range(8):
        output = rig.runner.execute_stepwise(Tick(tick))
        assert not output.errors, output.errors
        images |= {name: pixels_of(returned) for name, returned in output.images.items()}
    assert max(call.rows for call in rig.denoiser_calls()) == 4
    for spec, conditioning in asked:
        assert np.abs(images[spec.request_id].astype(float) - plain_image(plain, spec, conditioning)).max() <= 1.5


def test_image_to_image_requests_run_through_the_runner_as_diffusers_runs_them() -> None:
    asked = [(request("one", steps=4), IMG2IMG), (request("other", seed=2, guidance_scale=3.0), IMG2IMG | {"strength": 1.0})]
    check_with_images(RunnerRig(pipeline="StableDiffusion3Img2ImgPipeline"), asked)


def test_inpaint_requests_run_through_the_runner_as_diffusers_runs_them(tmp_path: Path) -> None:
    # The class wants latents of 16 channels: the digits model's architecture with four times as many, and random weights. The shift is 0
    # because the class forgets it; see `runner/pipelines/diffusers_workarounds.py`.
    folder = Path(shutil.copytree(DIGITS_MODEL, tmp_path / "wide", ignore=shutil.ignore_patterns("*.safetensors")))
    for part, change in (("transformer", {"in_channels": 16, "out_channels": 16}), ("vae", {"latent_channels": 16, "shift_factor": 0.0})):
        config = json.loads((folder / part / "config.json").read_text())
        (folder / part / "config.json").write_text(json.dumps(config | change))
    rig = RunnerRig(model=str(folder), load_format=LoadFormat.DUMMY, pipeline="StableDiffusion3InpaintPipeline")
    asked = [
        (request("one", steps=4), INPAINT | {"strength": 1.0}),
        (request("other", seed=2, steps=5, guidance_scale=3.0), INPAINT | {"mask_image": mask(3), "strength": 0.6}),
    ]
    check_with_images(rig, asked)


@pytest.fixture(scope="module")
def modular() -> RunnerRig:
    """Provide a runner that steps StableDiffusion3ModularPipeline in place of the usual class; the module's tests share it."""
    return RunnerRig(pipeline="StableDiffusion3ModularPipeline")


def image_of_modular(rig: RunnerRig, spec: RequestSpec) -> Any:
    """Make an image with diffusers' own modular pipeline for a request, at 32 pixels, and return its values as uint8."""
    pipeline = load_pipeline(rig.config, torch.float32)
    if spec.guidance_scale is not None:
        pipeline.update_components(guider=pipeline.guider.new(guidance_scale=spec.guidance_scale))
    images = pipeline(
        prompt=spec.prompt, negative_prompt=spec.negative_prompt, height=32, width=32, num_inference_steps=spec.steps,
        generator=torch.Generator().manual_seed(spec.seed), output_type="np", output="images",
    )  # fmt: skip
    return (np.asarray(images[0]) * 255).round().astype(np.uint8)


def test_a_modular_pipeline_alone_is_bit_equal_to_diffusers(modular: RunnerRig) -> None:
    spec = request("one", guidance_scale=3.0, negative_prompt="stripes kumquatfen")
    images, errors = modular.run(spec)
    assert not errors
    np.testing.assert_array_equal(images["one"], image_of_modular(modular, spec))


def test_modular_requests_with_other_guidance_share_steps_and_equal_their_images_alone(modular: RunnerRig) -> None:
    asked = [
        request("one", seed=1, steps=4, guidance_scale=5.0),
        request("two", seed=2, steps=6, guidance_scale=1.0),
        request("three", seed=3, steps=3, prompt="a green digit three"),
    ]
    images, errors = modular.run(*asked, joining=[0, 1, 2])
    assert not errors
    # Alone, the first and the third request make two calls a step. The second makes one, because its scale is 1.
    assert len(modular.denoiser_calls()) < 4 * 2 + 6 + 3 * 2
    for spec in asked:
        assert np.abs(images[spec.request_id].astype(int) - image_of_modular(modular, spec).astype(int)).max() <= 1


def test_a_modular_pipeline_that_takes_no_frames_refuses_them(modular: RunnerRig) -> None:
    _, errors = modular.run(request("one", frames=5))
    assert errors["one"].code == "InvalidRequest"
    assert errors["one"].message.startswith("frames: ")


def test_pixels_are_bytes_whatever_the_pipeline_returns() -> None:
    half = np.full((1, 4, 6, 3), 0.5)
    assert to_pixels(half).shape == (4, 6, 3)
    assert to_pixels(half).dtype == np.uint8
    assert to_pixels(half)[0, 0].tolist() == [128, 128, 128]
    assert to_pixels(np.zeros((1, 5, 4, 6, 3))).shape == (5, 4, 6, 3)
    assert to_pixels(torch.zeros(1, 3, 4, 6)).shape == (4, 6, 3)
    assert to_pixels([Image.new("RGB", (6, 4), (1, 2, 3))])[0, 0].tolist() == [1, 2, 3]
    assert to_pixels([[Image.new("RGB", (6, 4))] * 5]).shape == (5, 4, 6, 3)
    assert to_pixels(np.ones((1, 4, 6, 1))).shape == (4, 6, 3)
    assert to_pixels(np.full((1, 4, 6, 3), 1.7)).max() == 255


def test_values_that_are_no_numbers_make_no_image() -> None:
    with pytest.raises(RequestError, match="not numbers"):
        to_pixels(np.full((1, 4, 6, 3), np.nan))


@pytest.mark.parametrize(
    ("name", "kind", "size_multiple", "frame_multiple"),
    [
        ("StableDiffusionPipeline", "image", 8, 1),
        ("StableDiffusion3Pipeline", "image", 4, 1),
        ("FluxPipeline", "image", 4, 1),
        ("QwenImagePipeline", "image", 4, 1),
        ("WanPipeline", "video", 16, 4),
        ("CogVideoXPipeline", "video", 16, 4),
        ("LTXPipeline", "video", 32, 4),
        ("StableDiffusion3ModularPipeline", "image", 8, 1),
    ],
)
def test_sizes_and_kind_are_told_of_a_pipeline(name: str, kind: str, size_multiple: int, frame_multiple: int) -> None:
    told = describe(BUILDERS[name](), torch.float32, 0)
    assert (told.kind, told.size_multiple, told.frame_multiple) == (kind, size_multiple, frame_multiple)


def test_the_defaults_of_a_request_that_says_nothing_are_told() -> None:
    rig = RunnerRig()
    images, _ = rig.run(request("silent", height=None, width=None, steps=None))
    assert images["silent"].shape == (rig.model.default_height, rig.model.default_width, 3)
    assert (len(rig.denoiser_calls()), rig.model.default_frames) == (rig.model.default_steps, None)
    wan = describe(BUILDERS["WanPipeline"](), torch.float32, 0)
    assert (wan.default_height, wan.default_width, wan.default_frames, wan.default_steps) == (480, 832, 81, 50)


@pytest.mark.parametrize(
    ("name", "side"), [("ZImagePipeline", 1024), ("QwenImage21Pipeline", 1024), ("PRXPipeline", 512), ("FluxPipeline", 256)]
)
def test_the_size_that_only_the_call_of_a_class_says_is_told(name: str, side: int) -> None:
    told = describe(BUILDERS[name](), torch.float32, 0)
    assert (told.default_height, told.default_width) == (side, side)


def test_no_step_over_the_limit_runs_where_a_request_says_nothing() -> None:
    rig = RunnerRig()
    limits = RequestLimits(max_steps=2)
    assert rig.model.default_steps is not None and rig.model.default_steps > limits.max_steps
    asked = with_defaults(GenerationParams(prompt="a red digit seven"), RequestDefaults(), limits, rig.model)
    rig.run(request("silent", steps=asked.steps))
    assert len(rig.denoiser_calls()) == limits.max_steps


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("StableAudioPipeline", "StableAudioPipeline makes neither images nor videos"),
        ("StableDiffusionAttendAndExcitePipeline", "StableDiffusionAttendAndExcitePipeline needs gradients"),
    ],
)
def test_a_pipeline_that_cannot_be_served_is_refused_at_load(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        describe(without_loading(name), torch.float32, 0)


def test_a_model_that_makes_videos_is_refused_by_the_images_api_before_anything_runs() -> None:
    video = describe(BUILDERS["WanPipeline"](), torch.float32, 0)
    message = r"model: expected a pipeline that makes images, found WanPipeline, which makes a video"
    with pytest.raises(RequestError, match=message) as refused:
        check(GenerationParams(prompt="a wave kumquatfen"), RequestLimits(), video)
    assert refused.value.code == "InvalidRequest"
    check(GenerationParams(prompt="a wave kumquatfen"), RequestLimits(), msgspec.structs.replace(video, kind="image"))


def test_the_guidance_scale_of_a_request_that_has_none_is_known_and_asking_for_it_changes_nothing() -> None:
    rig = RunnerRig()
    known = rig.model.default_guidance_scale
    assert known == 7.0
    images, errors = rig.run(request("silent", steps=2))
    asked, more_errors = rig.run(request("asks", steps=2, guidance_scale=known))
    assert not errors and not more_errors
    assert np.array_equal(images["silent"], asked["asks"])


def test_a_class_that_guides_only_with_a_negative_prompt_has_no_scale_by_itself() -> None:
    assert default_guidance(without_loading("QwenImagePipeline")) is None
    assert default_guidance(without_loading("FluxPipeline")) == 3.5
