# SPDX-License-Identifier: Apache-2.0
"""The memory and the time of an edit, as the scheduler and admission estimate them."""

from typing import Any

import pytest

from diffusion_worker.config import RequestLimits
from diffusion_worker.engine.requests.admission import GenerationParams, InputImage, check, check_memory
from diffusion_worker.engine.scheduling.memory_model import MemoryModel
from diffusion_worker.engine.scheduling.request_class import Defaults, class_of
from diffusion_worker.engine.scheduling.request_queue import REMEMBERED_COURSES, RunLengthKey, RunLengths
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import ImageInput, ModelInfo, RequestSpec, Task

IMAGE = InputImage(b"", 512, 512)


def spec(**fields: Any) -> RequestSpec:
    return RequestSpec(
        **{"request_id": "r", "prompt": "p kumquatfen", "seed": 1, "height": 512, "width": 512, "guidance_scale": 1.0} | fields
    )


def edit(images: int = 1, **fields: Any) -> RequestSpec:
    return spec(task=Task.EDIT, images=[ImageInput(index, (512, 512, 3)) for index in range(images)], **fields)


def model(**fields: Any) -> ModelInfo:
    told: dict[str, Any] = {"pipeline": "P", "dtype": "float32", "size_multiple": 8, "weights_bytes": 1, "tasks": list(Task)}
    return ModelInfo(**told | {"max_input_images": 4} | fields)


def test_an_edit_that_starts_from_its_image_is_of_one_class_with_images_of_words() -> None:
    assert class_of(edit(strength=0.5), Defaults()) == class_of(spec(), Defaults())


def test_references_cost_as_much_as_the_image_that_is_made() -> None:
    words, one, two = (class_of(edit(number), Defaults(references=True)) for number in (0, 1, 2))
    assert (one.load, two.load) == (2 * words.load, 3 * words.load)
    assert len({words, one, two}) == 3


def test_an_edit_whose_references_do_not_fit_leaves_room_for_what_did_before() -> None:
    memory = MemoryModel(free_bytes=10**12)
    memory.failed(class_of(edit(3), Defaults(references=True)).load, 0.0)
    words = GenerationParams(prompt="p kumquatfen", height=512, width=512, guidance_scale=1.0)
    check_memory(words, model(references=True), memory.most_load(1.0))
    with pytest.raises(RequestError, match="fits in memory"):
        check_memory(
            GenerationParams(prompt="p kumquatfen", height=512, width=512, guidance_scale=1.0, task=Task.EDIT, images=[IMAGE] * 3),
            model(references=True),
            memory.most_load(1.0),
        )


def test_short_edits_do_not_make_the_length_of_other_requests_unsure() -> None:
    lengths = RunLengths()
    words, weak = RunLengthKey(20), RunLengthKey(20, Task.EDIT, 0.25)
    assert (lengths.of(words), lengths.of(weak)) == (21, 6)
    lengths.observe(words, 21)
    lengths.observe(weak, 5)
    assert (lengths.of(words), lengths.sure(words)) == (21, True)
    assert (lengths.of(weak), lengths.sure(weak)) == (5, True)


def test_lengths_of_no_more_strengths_are_kept_than_anybody_uses() -> None:
    lengths = RunLengths()
    for number in range(REMEMBERED_COURSES + 10):
        lengths.observe(RunLengthKey(20, Task.EDIT, number / 10_000), 5)
    assert not lengths.sure(RunLengthKey(20, Task.EDIT, 9 / 10_000))
    assert lengths.sure(RunLengthKey(20, Task.EDIT, 10 / 10_000))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": Task.EDIT}, "image: expected 1 to 4 images for P, found 0"),
        ({"task": Task.EDIT, "images": [IMAGE] * 5}, "image: expected 1 to 4 images for P, found 5"),
        ({"task": Task.EDIT, "images": [IMAGE], "strength": 0.0}, "strength: expected more than 0 and at most 1, found 0.0"),
        ({"task": Task.EDIT, "images": [IMAGE], "strength": 1.01}, "strength: expected more than 0 and at most 1, found 1.01"),
        (
            {"task": Task.INPAINT, "images": [IMAGE], "mask": InputImage(b"", 512, 256, 1)},
            "mask: expected the size of the image, 512x512, found 256x512",
        ),
        ({"negative_prompt": "n" * 8193}, "negative_prompt: expected at most 8192 characters, found 8193"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        check(GenerationParams(prompt="p kumquatfen", **fields), RequestLimits(), model())
    assert refused.value.message == says
