# SPDX-License-Identifier: Apache-2.0
"""The digits model as its card describes it: prompts for the base and for each adapter, drawn by plain diffusers and peft."""

import json
from typing import Any

import pytest

from support.runner.digit_exam import LORAS, MODEL, answers, below_the_card, load_pipeline, questions
from support.runner.digit_judge import STYLES

LARGEST_MODEL_BYTES = 8_000_000
# The first of ten; `make soak` draws with all ten.
SEEDS = 1


@pytest.mark.slow
def test_ten_prompts_for_the_base_and_for_each_adapter_are_drawn_as_the_card_says() -> None:
    results = {
        adapter: answers(load_pipeline(adapter=LORAS / adapter if adapter else None), questions(SEEDS)) for adapter in (None, *STYLES)
    }
    assert below_the_card(results) == []


class SeenAnswer:
    """An answer of the model without an image, with a verdict of the judge that a test gives."""

    def __init__(self, right: bool, *styles: str) -> None:
        self.all_right = self.digit_right = right
        self.styles = frozenset(styles)


def test_each_promise_of_the_card_can_be_broken() -> None:
    good: dict[str | None, list[Any]] = {None: [SeenAnswer(True)] * 20} | {style: [SeenAnswer(True, style)] * 20 for style in STYLES}
    assert below_the_card(good) == []
    for adapter, answer, broken in (
        (None, SeenAnswer(False), ["base: expected the digit and its colour in 90% of the images, found it in 85%"]),
        (None, SeenAnswer(True, "frame"), ["base: expected no style frame in 95% of the images, found it in 85%"]),
        ("paper", SeenAnswer(True), ["paper: expected the style paper in 95% of the images, found it in 85%"]),
        ("stripes", SeenAnswer(False, "stripes"), []),
    ):
        assert below_the_card(good | {adapter: [answer] * 3 + good[adapter][3:]}) == broken
    worse = good["stripes"][4:] + [SeenAnswer(False, "stripes")] * 4
    assert below_the_card(good | {"stripes": worse}) == ["stripes: expected the digit in 85% of the images, found it in 80%"]


def test_the_exam_asks_for_every_digit_with_ten_seeds_and_in_every_colour() -> None:
    asked = questions()
    assert len(asked) == len({(question.digit, question.seed) for question in asked}) == 100
    assert len({(question.digit, question.colour) for question in asked}) == 60


def test_the_model_is_an_ordinary_diffusers_folder_of_a_few_megabytes() -> None:
    index = json.loads((MODEL / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) < LARGEST_MODEL_BYTES


@pytest.mark.parametrize("style", STYLES)
def test_an_adapter_is_an_ordinary_peft_folder(style: str) -> None:
    config = json.loads((LORAS / style / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["bias"] == "none"
    assert not config["use_dora"]
