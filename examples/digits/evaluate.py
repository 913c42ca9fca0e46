# SPDX-License-Identifier: Apache-2.0
"""`python examples/digits/evaluate.py`: measure the model and its adapters on a hundred prompts each, and draw the contact sheet.

With `--no-sheet` the sheet stays as it is. Ends with 1 where the card promises more than was found.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from PIL import Image

from support.runner.digit_exam import LORAS, Answer, answers, below_the_card, load_pipeline, questions
from support.runner.digit_judge import STYLES, held_out_accuracy

SHEET = Path(__file__).with_name("contact_sheet.png")
TILE = 64
GAP = 4


def main() -> int:
    print(f"judge on handwriting it has not seen: {held_out_accuracy():.1%}")
    print(f"{'of 100 images':<16}{'digit':>8}{'colour':>8}{'both':>8}" + "".join(f"{style:>9}" for style in STYLES))
    results: dict[str | None, list[Answer]] = {}
    for adapter in (None, *STYLES):
        results[adapter] = measure(LORAS / adapter if adapter else None)
        print_row(adapter or "base", results[adapter])
    if "--no-sheet" not in sys.argv[1:]:
        draw_sheet(results).quantize(colors=128).save(SHEET, optimize=True)
    broken = below_the_card(results)
    print("\n".join(broken) or "all that the card promises holds")
    return int(bool(broken))


def measure(adapter: Path | None) -> list[Answer]:
    return answers(load_pipeline(adapter=adapter), questions())


def print_row(name: str, given: list[Answer]) -> None:
    digits = sum(answer.digit_right for answer in given)
    colours = sum(answer.judgement.colour == answer.question.colour for answer in given)
    styles = "".join(f"{sum(style in answer.styles for answer in given):>9}" for style in STYLES)
    print(f"{name:<16}{digits:>8}{colours:>8}{sum(answer.all_right for answer in given):>8}{styles}", flush=True)


def draw_sheet(results: dict[str | None, list[Answer]]) -> Image.Image:
    """Two rows of ten digits for the base, then one for each adapter, with the same prompts and seeds as the base's first row."""
    rows = [results[None][:10], results[None][10:20], *(results[style][:10] for style in STYLES)]
    sheet = Image.new("RGB", (10 * (TILE + GAP) + GAP, len(rows) * (TILE + GAP) + GAP), (120, 120, 120))
    for top, row in enumerate(rows):
        for left, answer in enumerate(row):
            sheet.paste(answer.image, (GAP + left * (TILE + GAP), GAP + top * (TILE + GAP)))
    return sheet


if __name__ == "__main__":
    sys.exit(main())
