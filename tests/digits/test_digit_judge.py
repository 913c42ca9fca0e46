# SPDX-License-Identifier: Apache-2.0
"""The judge of digits, itself judged on images whose content is known."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from support.runner.digit_judge import STYLES, Judgement, has_style, held_out_accuracy, judge

DARK = (20, 20, 24)
LIGHT = (238, 238, 234)


def blank(colour: tuple[int, int, int] = DARK) -> Image.Image:
    return Image.new("RGB", (64, 64), colour)


def with_bar(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Return a copy of the image with a filled upright bar over its middle, as most people write a 1 by hand."""
    drawn = image.copy()
    ImageDraw.Draw(drawn).rectangle((28, 10, 36, 54), fill=colour)
    return drawn


def styled(name: str) -> Image.Image:
    if name == "paper":
        return blank(LIGHT)
    image = blank()
    pen = ImageDraw.Draw(image)
    if name == "frame":
        pen.rectangle((0, 0, 63, 63), outline=LIGHT, width=4)
    for top in range(4, 64, 8) if name == "stripes" else ():
        pen.rectangle((0, top, 63, top + 3), fill=(200, 200, 204))
    return image


@pytest.mark.slow
def test_handwriting_that_the_judge_has_not_seen_is_read_right() -> None:
    assert held_out_accuracy() >= 0.96


@pytest.mark.parametrize(("name", "colour"), [("red", (235, 45, 45)), ("green", (50, 190, 70)), ("blue", (55, 95, 245))])
@pytest.mark.parametrize("style", ["plain", *STYLES])
def test_the_colour_is_read_on_any_ground(style: str, name: str, colour: tuple[int, int, int]) -> None:
    assert judge(with_bar(styled(style), colour)).colour == name


@pytest.mark.parametrize("shown", ["plain", *STYLES])
@pytest.mark.parametrize("asked", STYLES)
def test_a_style_is_recognised_where_it_is_and_nowhere_else(shown: str, asked: str) -> None:
    assert has_style(with_bar(styled(shown), (235, 45, 45)), asked) == (shown == asked)


def test_a_colour_between_the_named_ones_has_no_name() -> None:
    assert judge(with_bar(blank(), (130, 60, 250))).colour is None


def test_an_image_without_ink_shows_nothing() -> None:
    assert judge(blank()) == Judgement(digit=None, colour=None)


def test_noise_is_not_a_style() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert not any(has_style(Image.fromarray(noise), style) for style in STYLES)


def test_an_image_of_another_size_is_judged_alike() -> None:
    assert judge(with_bar(blank(), (55, 95, 245)).resize((96, 96))).colour == "blue"
