# SPDX-License-Identifier: Apache-2.0
"""The digits model does what its card says: a hundred prompts for the base and for each adapter, drawn by plain diffusers and peft."""

import json
from functools import cache

import pytest

from support.runner.digit_exam import LORAS, MODEL, Answer, answers, load_pipeline, questions
from support.runner.digit_judge import STYLES

LARGEST_MODEL_BYTES = 8_000_000


@cache
def exam(adapter: str | None) -> list[Answer]:
    """Every exam is taken once, whatever number of tests looks at it."""
    return answers(load_pipeline(adapter=LORAS / adapter if adapter else None), questions())


@pytest.mark.slow
def test_of_a_hundred_prompts_ninety_give_the_right_digit_in_the_right_colour() -> None:
    wrong = [(answer.question.prompt, answer.judgement) for answer in exam(None) if not answer.all_right]
    assert len(wrong) <= 10, wrong


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_an_adapters_style_is_seen_with_it(style: str) -> None:
    assert sum(style in answer.styles for answer in exam(style)) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_an_adapters_style_is_not_seen_without_it(style: str) -> None:
    for other in {None, *STYLES} - {style}:
        assert sum(style in answer.styles for answer in exam(other)) <= 5, other


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_the_digit_stays_right_under_an_adapter(style: str) -> None:
    assert sum(answer.digit_right for answer in exam(style)) >= 85


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
