# SPDX-License-Identifier: Apache-2.0
"""The image sheet of docs/lora.md: one prompt and one seed with every example adapter, at several strengths and mixed.

python -m tools.lora_sheet docs/images/lora-sheet.png
"""

import sys
from itertools import combinations
from pathlib import Path

from PIL import Image, ImageDraw

from diffusion_worker import DiffusionEngine

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
NAMES = ("stripes", "frame", "paper")
PROMPT, SEED = "a yellow digit three", 4
TILE, LABEL, GAP = 160, 16, 6

# Each cell is a mixture: adapters by name with their strengths.
Mixture = dict[str, float]
ROWS: list[list[Mixture]] = [
    [{}, *({name: 1.0} for name in NAMES)],
    *([{name: scale} for scale in (-0.5, 0.25, 0.5, 1.5)] for name in NAMES),
    [*({one: 1.0, other: 1.0} for one, other in combinations(NAMES, 2)), dict.fromkeys(NAMES, 1.0)],
    [{one: 0.5, other: 1.0} for one, other in combinations(NAMES, 2)] + [dict.fromkeys(NAMES, 0.5)],
]


def draw(images: list[list[tuple[str, Image.Image]]]) -> Image.Image:
    """Lay the rows of images out on a white sheet, each enlarged or shrunk to TILE pixels square below its label."""
    columns = max(map(len, images))
    sheet = Image.new("RGB", (columns * (TILE + GAP) + GAP, len(images) * (TILE + LABEL + GAP) + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for top, row in enumerate(images):
        for left, (label, image) in enumerate(row):
            place = (GAP + left * (TILE + GAP), GAP + top * (TILE + LABEL + GAP))
            pen.text(place, label, fill="black")
            sheet.paste(image.resize((TILE, TILE), Image.Resampling.NEAREST), (place[0], place[1] + LABEL))
    return sheet


def label_of(mixture: Mixture) -> str:
    return " + ".join(f"{name} {scale:g}" for name, scale in mixture.items()) or "no adapter"


def main(path: str) -> None:
    """Make the image of every mixture of adapters, write the sheet with all of them to `path`, and print its size in bytes."""
    with DiffusionEngine(DIGITS / "model", loras={name: DIGITS / "loras" / name for name in NAMES}) as engine:
        rows = [
            [
                (label_of(mixture), engine.generate(PROMPT, seed=SEED, lora_request=list(mixture), lora_scale=list(mixture.values()))[0])
                for mixture in row
            ]
            for row in ROWS
        ]
    draw([[(label, made.image) for label, made in row] for row in rows]).quantize(colors=128).save(path, optimize=True)
    print(path, Path(path).stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
