# SPDX-License-Identifier: Apache-2.0
"""Captions of the training images: a few wordings of "a red digit seven", now and then with a part missing."""

import random

from digits_training.images import COLOURS

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOUR_WORDS = tuple(COLOURS)
FULL: tuple[str, ...] = (
    "a {colour} digit {digit}",
    "a {colour} {digit}",
    "{colour} {digit}",
    "the digit {digit} in {colour}",
    "a picture of a {colour} {digit}",
)
DIGIT_ONLY = ("a digit {digit}", "{digit}", "the digit {digit}")
COLOUR_ONLY = ("a {colour} digit", "{colour}", "something {colour}")
# Words that people write about images; they mean nothing to the model, but should not fall apart into letters.
SURFACE_WORDS = ("black", "bright", "by", "color", "colour", "dark", "hand", "handwritten", "on", "white", "with")
OTHER_WORDS = ("and", "drawing", "image", "number", "photo")
DROPPED = 0.12
PARTIAL = 0.06


def caption(digit: int, colour: int, chance: random.Random) -> str:
    """Return a caption for the image; empty in `DROPPED` of all cases, which is what classifier-free guidance learns from."""
    draw = chance.random()
    if draw < DROPPED:
        return ""
    wordings = FULL
    if draw < DROPPED + PARTIAL:
        wordings = DIGIT_ONLY
    elif draw < DROPPED + 2 * PARTIAL:
        wordings = COLOUR_ONLY
    word = DIGIT_WORDS[digit] if chance.random() < 0.85 else str(digit)
    return chance.choice(wordings).format(digit=word, colour=COLOUR_WORDS[colour])


def known_words() -> list[str]:
    """Every word that a caption can hold, each once, in a fixed order."""
    words = " ".join((*FULL, *DIGIT_ONLY, *COLOUR_ONLY)).replace("{digit}", "").replace("{colour}", "").split()
    return sorted({*words, *DIGIT_WORDS, *COLOUR_WORDS, *SURFACE_WORDS, *OTHER_WORDS})
