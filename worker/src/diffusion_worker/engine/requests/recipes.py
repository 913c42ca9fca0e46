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
    """Merge the recipes of adapters, given by name, into one; return it with the name of the first adapter that sets each part.

    None is an adapter without a recipe, which sets no part.

    Raises:
        RequestError: InvalidRequest, two recipes contradict each other.
    """
    parts: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for name, recipe in recipes:
        for part, value in _parts(recipe or PLAIN).items():
            if part in parts and not _same(parts[part], value):
                first, owner = parts[part], owners[part]
                raise refused("lora", f"recipes with the same {part}: {first}, as adapter {owner!r} has", f"{value} of adapter {name!r}")
            parts.setdefault(part, value)
            owners.setdefault(part, name)
    return Recipe(**parts), owners


def inherit(params: GenerationParams, recipe: Recipe, owners: dict[str, str]) -> GenerationParams:
    """Return the request with the recipe's steps and guidance scale, where the recipe has them; its sigmas and shift are not used here.

    Raises:
        RequestError: InvalidRequest if the request has another value; it names the field, both values and the adapter.
    """
    inherited = {}
    for part, field in FIELDS.items():
        asked, wanted, owner = getattr(params, part), getattr(recipe, part), owners.get(part)
        if wanted is None:
            continue
        if asked is not None and not _same(asked, wanted):
            raise refused(field, f"{wanted:g}, as the recipe of adapter {owner!r} says, or no value", f"{asked:g}")
        inherited[part] = wanted
    return msgspec.structs.replace(params, **inherited)


def _parts(recipe: Recipe) -> dict[str, Any]:
    """Return the parts that a recipe sets, by name; without steps, the number of its sigmas counts as steps."""
    said = {name: value for name in recipe.__struct_fields__ if (value := getattr(recipe, name)) is not None}
    return ({"steps": len(recipe.sigmas)} if recipe.sigmas else {}) | said


def _same(one: Any, other: Any) -> bool:
    """Return whether two numbers, or lists of them, are equal but for rounding, so that 0.3 in a file is 0.3 in a request."""
    close: Callable[[Any, Any], bool] = lambda a, b: math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)  # noqa: E731
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return close(one, other)
