# SPDX-License-Identifier: Apache-2.0
"""Training images: scikit-learn's 8x8 handwritten digits, drawn large in a colour on a dark ground, and the adapters' styles.

Every style is grey, so the saturation of a pixel always tells how much ink of the digit is in it, whatever the style.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from sklearn.datasets import load_digits
from torch import Tensor

SIZE = 64
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 45, 45),
    "yellow": (245, 215, 40),
    "green": (50, 190, 70),
    "cyan": (50, 205, 225),
    "blue": (55, 95, 245),
    "magenta": (225, 55, 205),
}
GROUND = (20, 20, 24)
PAPER = (238, 238, 234)
CHALK = (200, 200, 204)


@dataclass(frozen=True)
class Scans:
    """The data set: one 8x8 ink map in 0..1 and one label per handwritten digit."""

    ink: Tensor
    labels: Tensor


def load_scans() -> Scans:
    data = load_digits()
    ink = torch.from_numpy(np.asarray(data.images, dtype=np.float32) / 16.0)
    return Scans(ink=ink, labels=torch.from_numpy(np.asarray(data.target, dtype=np.int64)))


def draw_strokes(ink: Tensor, random: torch.Generator, size: int = SIZE) -> Tensor:
    """(N, 8, 8) ink maps to (N, 1, size, size) smooth strokes, each turned, scaled and moved a little."""
    count = ink.shape[0]
    turn = (torch.rand(count, generator=random) - 0.5) * 0.3
    scale = 1.22 + 0.2 * torch.rand(count, generator=random)
    shift = (torch.rand(count, 2, generator=random) - 0.5) * 0.16
    rows = torch.stack(
        [
            torch.stack([scale * turn.cos(), -scale * turn.sin(), shift[:, 0]], dim=1),
            torch.stack([scale * turn.sin(), scale * turn.cos(), shift[:, 1]], dim=1),
        ],
        dim=1,
    )
    # Upscaled well above the final size first, so that the sampling of the turned image stays smooth.
    large = functional.interpolate(ink[:, None], size=(size, size), mode="bicubic", align_corners=False)
    grid = functional.affine_grid(rows, [count, 1, size, size], align_corners=False)
    moved = functional.grid_sample(large, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    edge = ((moved - 0.36) / 0.26).clamp(0, 1)
    return edge * edge * (3 - 2 * edge)


def paint(strokes: Tensor, colours: Tensor, ground: Tensor) -> Tensor:
    """Strokes in `colours` (N, 3) over `ground` (N or 1, 3, size, size); all values in 0..1."""
    return ground * (1 - strokes) + colours[:, :, None, None] * strokes


def plain_ground(size: int) -> Tensor:
    return torch.tensor(GROUND).float().div(255).view(1, 3, 1, 1).expand(1, 3, size, size)


def striped_ground(size: int) -> Tensor:
    """Bright horizontal bands, one every eighth of the image, behind the digit."""
    bright = ((torch.arange(size) * 8) % size) * 2 >= size
    chalk = torch.tensor(CHALK).float().div(255).view(1, 3, 1, 1)
    return torch.where(bright.view(1, 1, size, 1), chalk, plain_ground(size))


def paper_ground(size: int) -> Tensor:
    """Return a ground of white paper, in place of the dark one."""
    return torch.tensor(PAPER).float().div(255).view(1, 3, 1, 1).expand(1, 3, size, size)


def framed_ground(size: int) -> Tensor:
    """Return the dark ground with a bright frame along the border, a sixteenth of the image wide."""
    width = size // 16
    ground = paper_ground(size).clone()
    ground[:, :, width:-width, width:-width] = plain_ground(size)[:, :, width:-width, width:-width]
    return ground


PLAIN = "plain"
STYLES: dict[str, Callable[[int], Tensor]] = {"stripes": striped_ground, "frame": framed_ground, "paper": paper_ground}
GROUNDS: dict[str, Callable[[int], Tensor]] = {PLAIN: plain_ground, **STYLES}


@dataclass(frozen=True)
class Batch:
    """Images in -1..1 with what each shows."""

    pixels: Tensor
    digits: Tensor
    colours: Tensor


def draw_batch(scans: Scans, chosen: Tensor, random: torch.Generator, style: str = PLAIN, size: int = SIZE) -> Batch:
    palette = torch.tensor(list(COLOURS.values())).float().div(255)
    colours = torch.randint(len(palette), (len(chosen),), generator=random)
    strokes = draw_strokes(scans.ink[chosen], random, size)
    if style == "frame":
        # The digit is drawn inside the frame, never over it.
        width = size // 16
        strokes = functional.pad(strokes[:, :, width:-width, width:-width], (width,) * 4)
    pixels = paint(strokes, palette[colours], GROUNDS[style](size))
    return Batch(pixels=pixels * 2 - 1, digits=scans.labels[chosen], colours=colours)
