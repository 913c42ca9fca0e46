# SPDX-License-Identifier: Apache-2.0
"""The settings that a few-step adapter requires: JSON in its file's metadata, under `diffusion_recipe`."""

import itertools
import math
from collections.abc import Mapping

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Recipe

METADATA_KEY = "diffusion_recipe"
MAX_STEPS = 1000


def read_recipe(metadata: Mapping[str, str], label: str) -> Recipe | None:
    """Read the recipe from a file's metadata; None if there is none.

    Raises:
        RequestError: InvalidAdapter that names the field, if the recipe is not JSON of that form or a value is out of bounds.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        recipe = msgspec.json.decode(text, type=Recipe)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(f"{label}: {METADATA_KEY} of its metadata: {error}") from None
    for field, expected, fits in _rules(recipe):
        if not fits:
            found = getattr(recipe, "guidance_scale" if field == "guidanceScale" else field)
            raise _invalid(f"{label}: {METADATA_KEY} of its metadata: {field}: expected {expected}, found {str(found)[:120]}")
    return recipe


def _rules(recipe: Recipe) -> list[tuple[str, str, bool]]:
    """Return the rules for the fields that are set: the field's name, the expected value in words, and whether the rule is kept."""
    sigmas = recipe.sigmas
    rules = []
    if recipe.steps is not None:
        rules.append(("steps", f"1 to {MAX_STEPS}", 1 <= recipe.steps <= MAX_STEPS))
    if recipe.guidance_scale is not None:
        rules.append(("guidanceScale", "a number of at least 0", math.isfinite(recipe.guidance_scale) and recipe.guidance_scale >= 0))
    if sigmas is not None:
        falling = all(one > other for one, other in itertools.pairwise(sigmas))
        rules.append(
            (
                "sigmas",
                "numbers over 0, each less than the one before",
                bool(sigmas) and falling and math.isfinite(sigmas[0]) and sigmas[-1] > 0,
            )
        )
        rules.append(("sigmas", f"at most {MAX_STEPS} numbers", len(sigmas) <= MAX_STEPS))
        rules.append(("sigmas", f"{recipe.steps} numbers, one for each of its steps", recipe.steps in (None, len(sigmas))))
    if recipe.shift is not None:
        rules.append(("shift", "a number over 0", math.isfinite(recipe.shift) and recipe.shift > 0))
    return rules


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
