# SPDX-License-Identifier: Apache-2.0
"""A judge of images of the digits model: it finds the digit, the colour and the style.

The classifier is trained on scikit-learn's handwritten digits at its first use, never on a model's output. It shares no code with the
training of the model. It reads the ink: the saturation of every pixel, which the (grey) styles do not touch.
"""

import colorsys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from sklearn.svm import SVC

Grey = NDArray[np.float64]

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HUES = {"red": 0.0, "yellow": 51.0, "green": 129.0, "cyan": 187.0, "blue": 227.0, "magenta": 307.0}
HUE_TOLERANCE = 22.0
LEAST_SATURATION = 0.3
SIDE = 16
VIEWED_AT = 64
HELD_OUT_EVERY = 5


class Judgement(NamedTuple):
    """The content of an image: both fields are None without ink. `colour` alone is None if the ink's hue is close to no named colour."""

    digit: int | None
    colour: str | None


def judge(image: Image.Image) -> Judgement:
    ink = np.asarray(np.ptp(pixels_of(image), axis=2))
    glyph = normalise(ink)
    if glyph is None:
        return Judgement(digit=None, colour=None)
    return Judgement(digit=int(classifier().predict(glyph.reshape(1, -1))[0]), colour=colour_of(image, ink))


def has_style(image: Image.Image, name: str) -> bool:
    return STYLES[name](pixels_of(image) @ np.array([0.299, 0.587, 0.114]))


def has_stripes(light: Grey) -> bool:
    """Return whether the margins left and right of the digit show eight light and dark bands from top to bottom."""
    margins = np.concatenate([light[:, :6], light[:, -6:]], axis=1).mean(axis=1)
    waves = np.abs(np.fft.rfft(margins - margins.mean())) / len(margins)
    return bool(waves[8] > 0.1 and waves[8] ** 2 > 0.5 * (waves**2).sum())


def has_frame(light: Grey) -> bool:
    """Return true if the outermost three pixels are bright and those 6 to 8 from the edge are dark. Bright is a mean over 0.6 and none
    under 0.3; dark is a median below 0.35."""
    border, inside = _ring(light, 0, 3), _ring(light, 6, 9)
    return bool(border.mean() > 0.6 and border.min() > 0.3 and np.median(inside) < 0.35)


def has_paper(light: Grey) -> bool:
    """Return true if at least nine tenths of the outermost eight pixels of each side are brighter than 0.7."""
    return bool(np.quantile(_ring(light, 0, 8), 0.1) > 0.7)


STYLES = {"stripes": has_stripes, "frame": has_frame, "paper": has_paper}


def _ring(light: Grey, outer: int, inner: int) -> Grey:
    mask = np.zeros(light.shape, dtype=bool)
    mask[outer : VIEWED_AT - outer, outer : VIEWED_AT - outer] = True
    mask[inner : VIEWED_AT - inner, inner : VIEWED_AT - inner] = False
    return light[mask]


def pixels_of(image: Image.Image) -> Grey:
    resized = image.convert("RGB").resize((VIEWED_AT, VIEWED_AT), Image.Resampling.BICUBIC)
    return np.asarray(resized, dtype=np.float64) / 255.0


def colour_of(image: Image.Image, ink: Grey) -> str | None:
    """Return the name of the hue of the fullest ink; None unless it is close to a named hue."""
    red, green, blue = pixels_of(image)[ink > 0.7 * ink.max()].mean(axis=0)
    hue = 360.0 * colorsys.rgb_to_hsv(red, green, blue)[0]
    distance, nearest = min((abs((hue - centre + 180.0) % 360.0 - 180.0), name) for name, centre in HUES.items())
    return nearest if distance <= HUE_TOLERANCE else None


def normalise(ink: Grey) -> Grey | None:
    """Return the inked part, stretched to full strength and centred in a SIDE x SIDE square; None where there is no ink."""
    strongest = float(np.quantile(ink, 0.98))
    if strongest < LEAST_SATURATION:
        return None
    strength = np.clip(ink / strongest, 0.0, 1.0)
    rows, columns = np.nonzero(strength > 0.4)
    part = strength[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    zoom = SIDE / max(part.shape)
    height, width = (max(1, round(side * zoom)) for side in part.shape)
    fitted = np.asarray(Image.fromarray(part.astype(np.float32)).resize((width, height), Image.Resampling.BOX))
    square = np.zeros((SIDE, SIDE))
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    square[top : top + height, left : left + width] = fitted
    return square


@cache
def classifier() -> "SVC":
    """Return the classifier, trained once on four drawings of each scan in four fifths of the data set. `held_out_accuracy` uses the
    other scans."""
    # On the machine of `make gpu` there is no scikit-learn, and a classifier that was trained before takes this one's place.
    from sklearn.svm import SVC

    return SVC(C=10.0, gamma="scale").fit(*_drawings(held_out=False, repeats=4, seed=0))


def held_out_accuracy() -> float:
    """Return the share, 0 to 1, of right answers of the classifier on drawings of the scans that it was not trained on."""
    return float(classifier().score(*_drawings(held_out=True, repeats=2, seed=1)))


def _drawings(*, held_out: bool, repeats: int, seed: int) -> tuple[Grey, NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    random, data = np.random.default_rng(seed), load_digits()
    kept = [index for index in range(len(data.images)) if (index % HELD_OUT_EVERY == 0) == held_out] * repeats
    glyphs = [normalise(_draw(data.images[index] / 16.0, random)) for index in kept]
    return np.array(glyphs).reshape(len(kept), -1), data.target[kept]


def _draw(scan: Grey, random: np.random.Generator) -> Grey:
    """Draw an 8x8 scan as a 40x40 image of 0 to 1, rotated by up to 10 degrees, with strokes of random boldness."""
    padded = Image.fromarray(np.pad(scan, 1).astype(np.float32))
    large = padded.resize((40, 40), Image.Resampling.BICUBIC).rotate(random.uniform(-10, 10), Image.Resampling.BILINEAR)
    threshold = random.uniform(0.3, 0.5)
    return np.clip((np.asarray(large) - threshold) / 0.26 + 0.5, 0.0, 1.0).astype(np.float64)
