# SPDX-License-Identifier: Apache-2.0
"""Recipes of adapters applied to a request: it inherits values it leaves open, and may set no others. Pure."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.errors import refused
from diffusion_worker.messages import Recipe

PLAIN = Recipe()
# The request fields that a recipe's parts set.
FIELDS = {"steps": "num_inference_steps", "guidance_scale": "guidance_scale"}


def agreed(recipes: Sequence[tuple[str, Recipe | None]]) -> tuple[Recipe, dict[str, str]]:
    """Merge several adapters' recipes, and return which adapter each part came from.

    Raises:
        RequestError: InvalidRequest, two recipes contradict each other.
    """
    parts: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for name, recipe in recipes:
        for part, value in _parts(recipe or PLAIN).items():
            if part in parts and not _same(parts[part], value):
                expected = f"adapters that prescribe the same {part}, {parts[part]} as adapter {owners[part]!r}"
                raise refused("lora", expected, f"{value} of adapter {name!r}")
            parts.setdefault(part, value)
            owners.setdefault(part, name)
    return Recipe(**parts), owners


def inherit(params: GenerationParams, recipe: Recipe, owners: dict[str, str]) -> GenerationParams:
    """Return the request with the recipe's values for fields that it leaves open.

    Raises:
        RequestError: InvalidRequest that names the field, the value of the recipe, the value found, and the adapter.
    """
    inherited = {}
    for part, field in FIELDS.items():
        asked, wanted = getattr(params, part), getattr(recipe, part)
        if wanted is None:
            continue
        if asked is not None and not _same(asked, wanted):
            raise refused(field, f"{wanted:g}, as the recipe of adapter {owners[part]!r} says, or nothing", f"{asked:g}")
        inherited[part] = wanted
    return msgspec.structs.replace(params, **inherited)


def _parts(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's parts; sigmas imply the number of steps."""
    said = {name: value for name in recipe.__struct_fields__ if (value := getattr(recipe, name)) is not None}
    return ({"steps": len(recipe.sigmas)} if recipe.sigmas else {}) | said


def _same(one: Any, other: Any) -> bool:
    """Return whether two numbers, or lists of them, are equal but for rounding, so that 0.3 in a file is 0.3 in a request."""
    close: Callable[[Any, Any], bool] = lambda a, b: math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)  # noqa: E731
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return close(one, other)
