# SPDX-License-Identifier: Apache-2.0
"""Tasks that a model's components allow, and edits and inpaintings on the digits model through the runner."""

from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from PIL import Image

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import RequestError
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import ImageInput, LoRAUse, RequestSpec, Task, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.pipelines.description import describe
from diffusion_worker.runner.pipelines.tasks import TaskPipelines
from diffusion_worker.runner.stepping.pixels import pixels_of
from support.families.rig.all import FAMILIES
from support.families.rig.family import image
from support.runner.rig import Images, OneRank, RunnerRig, levels_apart, request
from support.worker.process import DIGITS

BUILDERS = {family.name: family.build for family in FAMILIES}
SIDE = 64
LEFT = np.repeat(np.array([[255] * (SIDE // 2) + [0] * (SIDE // 2)], np.uint8), SIDE, axis=0)


def without_modules(name: str) -> Any:
    """Return a pipeline of this class without components, because its tasks depend on the class only."""
    return object.__new__(type(name, (getattr(diffusers, name),), {"components": {}}))


def worded(name: str) -> Any:
    """Return a tiny pipeline whose tokenizers limit the number of tokens, as those of real models do."""
    pipeline = BUILDERS[name]()
    for part in pipeline.components.values():
        if hasattr(part, "model_max_length"):
            part.model_max_length = 24
    return pipeline


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


@pytest.fixture(scope="module")
def seven(rig: RunnerRig) -> Any:
    """Provide a red seven that the model made."""
    images, _ = rig.run(request("seven", height=SIDE, width=SIDE, steps=12, guidance_scale=3.0))
    return images["seven"]


def edit(name: str, **fields: Any) -> RequestSpec:
    """Return an edit of one image in the model's size."""
    usual = {"prompt": "a green digit three", "height": SIDE, "width": SIDE, "guidance_scale": 3.0, "steps": 10}
    return request(name, **usual | {"task": Task.EDIT, "images": [ImageInput(0, (SIDE, SIDE, 3))]} | fields)


def inpaint(name: str, **fields: Any) -> RequestSpec:
    """Return an inpainting request at full strength: the usual edit, whose second file is the one-channel mask."""
    return edit(name, **{"task": Task.INPAINT, "mask": ImageInput(1, (SIDE, SIDE, 1)), "strength": 1.0} | fields)


def made(rig: RunnerRig, seven: Any, *specs: RequestSpec) -> Images:
    """Run requests that edit the image `seven`, with its left half as the mask of inpaintings; all must succeed. Return their images."""
    frames = {spec.request_id: [seven.tobytes(), LEFT.tobytes()][: len(spec.images) + (spec.mask is not None)] for spec in specs}
    images, errors = rig.run(*specs, frames=frames)
    assert not errors, errors
    return images


def apart(one: Any, other: Any) -> float:
    """Return the mean difference of the colours of two images, of 255."""
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


def test_a_text_to_image_model_serves_edits_and_inpainting_by_the_classes_for_its_components(rig: RunnerRig) -> None:
    assert (rig.model.tasks, rig.model.max_input_images, rig.model.references) == ([Task.GENERATE, Task.EDIT, Task.INPAINT], 1, False)


def test_companions_hold_the_same_modules_and_schedulers_of_their_own(rig: RunnerRig) -> None:
    served = TaskPipelines(rig.runner.pipeline)
    for task, kind in ((Task.EDIT, "StableDiffusion3Img2ImgPipeline"), (Task.INPAINT, "StableDiffusion3InpaintPipeline")):
        companion = served.pipeline_of(task)
        assert type(companion).__name__ == kind
        for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
            assert getattr(companion, name) is getattr(rig.runner.pipeline, name)
        assert companion.scheduler is not rig.runner.pipeline.scheduler


@pytest.mark.slow
def test_an_edit_alone_is_bit_equal_to_diffusers(rig: RunnerRig, seven: Any) -> None:
    plain = diffusers.StableDiffusion3Img2ImgPipeline(**load_pipeline(rig.config, torch.float32).components)
    plain.set_progress_bar_config(disable=True)
    [expected] = plain(
        "a green digit three", image=Image.fromarray(seven), strength=0.6, num_inference_steps=10, guidance_scale=3.0,
        height=SIDE, width=SIDE, generator=torch.Generator().manual_seed(1), output_type="np",
    ).images  # fmt: skip
    found = made(rig, seven, edit("one", strength=0.6))["one"]
    np.testing.assert_array_equal(found, (expected * 255).round().astype(np.uint8))
    assert len(rig.denoiser_calls()) == 6


@pytest.mark.slow
def test_an_inpainting_alone_has_the_latents_of_diffusers_decoded_with_the_vaes_shift(rig: RunnerRig, seven: Any) -> None:
    plain = diffusers.StableDiffusion3InpaintPipeline(**load_pipeline(rig.config, torch.float32).components)
    plain.set_progress_bar_config(disable=True)
    # The class recognises by this number that the model takes no mask.
    plain.transformer._internal_dict = FrozenDict({**plain.transformer.config, "in_channels": 16})
    latents = plain(
        "a green digit three", image=Image.fromarray(seven), mask_image=Image.fromarray(LEFT), strength=1.0, num_inference_steps=10,
        guidance_scale=3.0, height=SIDE, width=SIDE, generator=torch.Generator().manual_seed(1), output_type="latent",
    ).images  # fmt: skip
    with torch.inference_mode():
        decoded = plain.vae.decode(latents / plain.vae.config.scaling_factor + plain.vae.config.shift_factor).sample
    expected = plain.image_processor.postprocess(decoded, output_type="np")[0]
    found = made(rig, seven, inpaint("one"))["one"]
    np.testing.assert_array_equal(found, (expected * 255).round().astype(np.uint8))


@pytest.mark.slow
def test_an_inpainted_image_keeps_what_the_mask_keeps_and_changes_the_rest(rig: RunnerRig, seven: Any) -> None:
    found = made(rig, seven, inpaint("one"))["one"]
    # The right side is the seven after the VAE, which also sees the changed side at the border.
    assert apart(found[:, 40:], seven[:, 40:]) < 3
    assert apart(found[:, :32], seven[:, :32]) > 10


@pytest.mark.slow
def test_an_edit_of_little_strength_stays_near_its_image_and_one_of_much_does_not(rig: RunnerRig, seven: Any) -> None:
    images = made(rig, seven, edit("near", strength=0.1), edit("far", strength=1.0))
    assert apart(images["near"], seven) < 4
    assert apart(images["far"], seven) > 15


@pytest.mark.slow
def test_an_image_of_another_shape_is_cut_evenly_and_not_distorted(rig: RunnerRig, seven: Any) -> None:
    wide = np.concatenate([np.zeros((SIDE, 20, 3), np.uint8), seven, np.zeros((SIDE, 20, 3), np.uint8)], axis=1)
    spec = edit("wide", strength=0.4, images=[ImageInput(0, wide.shape)])
    images, errors = rig.run(spec, frames={"wide": [wide.tobytes()]})
    assert not errors
    np.testing.assert_array_equal(images["wide"], made(rig, seven, edit("one", strength=0.4))["one"])


@pytest.mark.slow
def test_requests_of_all_tasks_share_model_calls_and_equal_themselves_alone(rig: RunnerRig, seven: Any) -> None:
    specs = [
        request("words", height=SIDE, width=SIDE, steps=5, guidance_scale=3.0),
        edit("edit", seed=2, strength=0.5),
        inpaint("part", seed=3, steps=5),
    ]
    alone = [made(rig, seven, spec)[spec.request_id] for spec in specs]
    together = made(rig, seven, *specs)
    assert [call.rows for call in rig.denoiser_calls()] == [6] * 5
    for spec, expected in zip(specs, alone, strict=True):
        assert levels_apart(together[spec.request_id], expected) <= 1


@pytest.mark.slow
def test_an_adapter_applies_to_edits_and_a_base_edit_beside_it_is_untouched(rig: RunnerRig, seven: Any) -> None:
    assert rig.runner.loras is not None
    rig.runner.loras.add_adapter(LoRARequest("stripes", 1, str(DIGITS / "loras" / "stripes")))
    try:
        base, striped = edit("base", strength=0.9), edit("striped", strength=0.9, loras=[LoRAUse(1, 1.0)])
        before = made(rig, seven, base)["base"]
        images = made(rig, seven, base, striped)
        assert levels_apart(images["base"], before) <= 1
        assert apart(images["striped"], before) > 5
    finally:
        rig.runner.loras.remove_adapter(1)


@pytest.mark.parametrize(
    ("spec", "frames", "says"),
    [
        (edit("x", images=[]), 0, "image: expected one image, found 0"),
        (edit("x", images=[ImageInput(0, (SIDE, SIDE, 3))] * 2), 1, "image: expected one image, found 2"),
        (edit("x", mask=ImageInput(1, (SIDE, SIDE, 1))), 2, "mask: expected no mask, found a mask"),
        (inpaint("x", mask=None), 1, "mask: expected a mask, found no mask"),
    ],
)
def test_what_the_class_does_not_take_of_an_edit_is_the_requests_error(rig: RunnerRig, spec: RequestSpec, frames: int, says: str) -> None:
    sent = [np.zeros((SIDE, SIDE, 3), np.uint8).tobytes(), LEFT.tobytes()][:frames]
    _, errors = rig.run(spec, frames={"x": sent})
    assert (errors["x"].code, errors["x"].message) == ("InvalidRequest", says)


@pytest.mark.slow
def test_a_modular_pipeline_edits_by_its_own_blocks(seven: Any) -> None:
    modular = RunnerRig(pipeline="StableDiffusion3ModularPipeline")
    assert modular.model.tasks == [Task.GENERATE, Task.EDIT]
    images = made(modular, seven, edit("near", strength=0.1), edit("far", strength=1.0))
    assert apart(images["near"], seven) < 4
    assert apart(images["far"], seven) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tasks", "most", "references"),
    [
        ("StableDiffusion3Img2ImgPipeline", [Task.EDIT], 1, False),
        ("StableDiffusionInpaintPipeline", [Task.INPAINT], 1, False),
        ("StableDiffusionInstructPix2PixPipeline", [Task.EDIT], 1, False),
        ("StableDiffusionControlNetPipeline", [Task.EDIT], 1, False),
        ("StableDiffusionControlNetImg2ImgPipeline", [], 0, False),
        ("StableDiffusionUpscalePipeline", [], 0, False),
        ("FluxPipeline (words)", [Task.GENERATE, Task.EDIT, Task.INPAINT], 1, False),
        ("FluxKontextPipeline", [Task.GENERATE, Task.EDIT, Task.INPAINT], 2, True),
        ("Flux2Pipeline", [Task.GENERATE, Task.EDIT], 16, True),
        ("QwenImageEditPipeline", [Task.EDIT, Task.INPAINT], 1, True),
        ("QwenImageEditPlusPipeline", [Task.EDIT], 16, True),
        ("StableDiffusionXLPipeline", [Task.GENERATE, Task.EDIT, Task.INPAINT], 1, False),
        ("DiTPipeline", [], 0, False),
    ],
)
def test_the_tasks_of_a_pipeline_are_what_its_class_and_components_allow(name: str, tasks: list[Task], most: int, references: bool) -> None:
    pipeline = BUILDERS[name]()
    told = TaskPipelines(pipeline).describe(describe(pipeline, torch.float32, 0))
    assert (told.tasks, told.max_input_images, told.references) == (tasks, most, references)


@pytest.mark.parametrize("name", ["QwenImageEditPlusPipeline", "Flux2Pipeline"])
def test_references_reach_the_class_as_they_are_and_in_their_order(name: str) -> None:
    images = [image(1, 48, 16), image(2, 16, 32)]
    spec = RequestSpec(
        request_id="one", prompt="both", seed=1, height=32, width=64, task=Task.EDIT,
        images=[ImageInput(index, (each.height, each.width, 3)) for index, each in enumerate(images)],
    )  # fmt: skip
    body = TaskPipelines(BUILDERS[name]()).body(spec, [each.tobytes() for each in images])
    given = body._arguments
    assert [each.tobytes() for each in given["image"]] == [each.tobytes() for each in images]
    assert [each.size for each in given["image"]] == [(48, 16), (16, 32)]
    assert (given["height"], given["width"]) == (32, 64)


def test_a_class_that_makes_images_of_the_size_of_its_first_gets_one_of_the_size_asked_for() -> None:
    spec = RequestSpec(
        request_id="one", prompt="p", seed=1, height=16, width=32, strength=0.5, task=Task.EDIT, images=[ImageInput(0, (40, 40, 3))]
    )
    given = TaskPipelines(BUILDERS["StableDiffusionImg2ImgPipeline"]()).body(spec, [image(1, 40, 40).tobytes()])._arguments
    assert (given["image"].size, given["strength"]) == ((32, 16), 0.5)
    assert "height" not in given and "width" not in given


def test_a_request_of_words_for_a_model_that_needs_an_image_is_refused_before_it_runs() -> None:
    with pytest.raises(RequestError, match="serves generate, found QwenImageEditPipeline, which serves edit"):
        TaskPipelines(BUILDERS["QwenImageEditPipeline"]()).body(request("one"))


def test_a_size_that_is_asked_of_kontext_is_the_one_it_makes() -> None:
    spec = msgspec.structs.replace(request("one"), height=32, width=64)
    given = TaskPipelines(BUILDERS["FluxKontextPipeline"]()).body(spec)._arguments
    assert given["max_area"] == 32 * 64


@pytest.mark.parametrize(("asked", "steps", "given"), [(0.5, 4, 0.5), (None, 4, None), (None, 1, 1.0), (0.25, 4, 0.25)])
def test_an_edit_of_few_steps_takes_at_least_one(asked: float | None, steps: int, given: float | None) -> None:
    pipelines = TaskPipelines(without_modules("StableDiffusionImg2ImgPipeline"))
    spec = edit("one", steps=steps, strength=asked, height=16, width=16, images=[ImageInput(0, (16, 16, 3))])
    assert pipelines.body(spec, [bytes(16 * 16 * 3)])._arguments.get("strength") == given


def test_a_strength_of_almost_nothing_is_refused_and_leaves_the_ranks_alive(rig: RunnerRig) -> None:
    _, errors = rig.run(edit("x", strength=5e-324), frames={"x": [bytes(SIDE * SIDE * 3)]})
    assert errors["x"].message == "strength: expected at least 0.1, so that one of 10 steps is left, found 5e-324"


def test_a_strength_that_leaves_no_step_is_refused_where_the_class_would_take_none() -> None:
    spec = edit("one", steps=4, strength=0.1, images=[ImageInput(0, (16, 16, 3))])
    with pytest.raises(RequestError, match=r"strength: expected at least 0.25, so that one of 4 steps is left, found 0.1"):
        TaskPipelines(without_modules("StableDiffusionImg2ImgPipeline")).body(spec, [bytes(16 * 16 * 3)])
    body = TaskPipelines(without_modules("StableDiffusion3Img2ImgPipeline")).body(spec, [bytes(16 * 16 * 3)])
    assert body._arguments["strength"] == 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "kind"),
    [
        ("FluxPipeline (words)", Task.EDIT, "FluxImg2ImgPipeline"),
        ("FluxPipeline (words)", Task.INPAINT, "FluxInpaintPipeline"),
        ("QwenImagePipeline (words)", Task.EDIT, "QwenImageImg2ImgPipeline"),
        ("QwenImagePipeline (words)", Task.INPAINT, "QwenImageInpaintPipeline"),
    ],
)
def test_a_companion_alone_is_bit_equal_to_its_class_of_diffusers(name: str, task: Task, kind: str) -> None:
    source, mask = image(1, 32, 32), Image.fromarray(LEFT[:32, 16:48])
    runner = DiffusionModelRunner(WorkerConfig(model="(in memory)", served_name="m"), torch.device("cpu"), OneRank())  # type: ignore[arg-type]
    runner.adopt(worded(name), torch.float32, lambda done, total: None)
    masked = {"mask": ImageInput(1, (32, 32, 1))} if task is Task.INPAINT else {}
    spec = request("one", prompt="two", task=task, images=[ImageInput(0, (32, 32, 3))], strength=0.7, steps=4, **masked)
    frames = [source.tobytes(), mask.tobytes()][: 1 + len(masked)]
    output = runner.execute_stepwise(Tick(0, [spec], frames=[len(frames)]), frames)
    for number in range(1, 20):
        if output.images or output.errors:
            break
        output = runner.execute_stepwise(Tick(number))
    assert not output.errors, output.errors
    plain = getattr(diffusers, kind)(**worded(name).components)
    guidance = {"guidance_scale": 3.5} if name.startswith("Flux") else {}  # the value for prompts alone; the class has another default
    plain.set_progress_bar_config(disable=True)
    [expected] = plain(
        "two", image=source, strength=0.7, num_inference_steps=4, height=32, width=32, output_type="np",
        generator=torch.Generator().manual_seed(1), **({"mask_image": mask} if masked else {}), **guidance,
    ).images  # fmt: skip
    np.testing.assert_array_equal(pixels_of(output.images["one"]), (expected * 255).round().astype(np.uint8))


def test_what_an_edit_leaves_open_is_as_with_the_loaded_class() -> None:
    spec = request("one", steps=None, task=Task.EDIT, images=[ImageInput(0, (32, 32, 3))])
    given = TaskPipelines(BUILDERS["FluxPipeline (words)"]()).body(spec, [bytes(32 * 32 * 3)])._arguments
    # The class of edits has another default, 7.0.
    assert (given["num_inference_steps"], given["guidance_scale"]) == (28, 3.5)
