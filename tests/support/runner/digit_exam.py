# SPDX-License-Identifier: Apache-2.0
"""The exam of the digits model: a hundred prompts, drawn by the plain diffusers pipeline, judged by `digit_judge`.

Real: the trained model, diffusers and peft. The worker takes no part. The tests draw thirty of the prompts. examples/digits/evaluate.py,
which `make soak` runs, draws all of them and requires the same shares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from peft import PeftModel
from PIL import Image

from support.runner.digit_judge import DIGIT_WORDS, HUES, STYLES, has_style, judge

MODEL, LORAS = (Path(__file__).parents[3] / "examples" / "digits" / name for name in ("model", "loras"))
# On CPUs an image takes longer in larger batches: 0.36 s of CPU with 50, 0.26 s with 10.
DRAWN_AT_ONCE = 10


@dataclass(frozen=True)
class Question:
    """An exam item: the digit and colour to paint and the noise seed. The prompt is made from them."""

    digit: int
    colour: str
    seed: int

    @property
    def prompt(self) -> str:
        return f"a {self.colour} digit {DIGIT_WORDS[self.digit]}"


class Answer:
    """An image, and the judge's verdict on it."""

    def __init__(self, question: Question, image: Image.Image) -> None:
        self.question, self.image, self.judgement = question, image, judge(image)
        self.styles = frozenset(name for name in STYLES if has_style(image, name))
        self.digit_right = self.judgement.digit == question.digit
        self.all_right = self.judgement == (question.digit, question.colour)


def questions(seeds: int = 10) -> list[Question]:
    """Return a question for each of ten digits and each seed; the colours rotate, so ten seeds ask for every digit in every colour."""
    colours = list(HUES)
    return [Question(digit, colours[(digit + seed) % len(colours)], seed) for seed in range(seeds) for digit in range(10)]


def load_pipeline(*, adapter: Path | None = None) -> Any:
    """Load the plain pipeline in float32, optionally with one peft adapter merged into its transformer."""
    # Diffusers sets components that the folder declares absent to None only if these arguments say so.
    pipeline = StableDiffusion3Pipeline.from_pretrained(MODEL, dtype=torch.float32, text_encoder_3=None, tokenizer_3=None)
    if adapter is not None:
        pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, str(adapter)).merge_and_unload()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def answers(pipeline: Any, asked: Sequence[Question]) -> list[Answer]:
    """Draw an image for each question in 12 steps, in batches with a generator each, and judge it."""
    images: list[Image.Image] = []
    for start in range(0, len(asked), DRAWN_AT_ONCE):
        part = asked[start : start + DRAWN_AT_ONCE]
        seeds = [torch.Generator().manual_seed(question.seed) for question in part]
        images += pipeline([each.prompt for each in part], num_inference_steps=12, guidance_scale=4.0, generator=seeds).images
    return list(map(Answer, asked, images))


def below_the_card(results: Mapping[str | None, Sequence[Answer]]) -> list[str]:
    """Return a sentence for each share of right answers that is under the model card's minimum; empty if none is. The results are keyed
    by style, None for no adapter."""
    shares = {("the digit and its colour", None): (_share(results[None], lambda answer: answer.all_right), 0.90)}
    for style in STYLES:
        shares["the digit", style] = (_share(results[style], lambda answer: answer.digit_right), 0.85)
        shares[f"the style {style}", style] = (_share(results[style], lambda answer, style=style: style in answer.styles), 0.95)
        for other in {None, *STYLES} - {style}:
            shares[f"no style {style}", other] = (_share(results[other], lambda answer, style=style: style not in answer.styles), 0.95)
    return [
        f"{adapter or 'base'}: expected {what} in {least:.0%} of the images, found it in {share:.0%}"
        for (what, adapter), (share, least) in shares.items()
        if share < least
    ]


def _share(answers: Sequence[Answer], holds: Callable[[Answer], bool]) -> float:
    return sum(map(holds, answers)) / len(answers)
