# SPDX-License-Identifier: Apache-2.0
"""Manifests to structs at the edge: after this, structs only.

An object may have been stored before the schema that we read it by. So an error names the field, what was expected and what was found.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.errors import NotUnderstood

Parsed = TypeVar("Parsed")

_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"[^.\[\]]+|\[(?:\d+|\.\.\.)\]")
_ELEMENT = "[]"
"""A step to any element of a list, or to any value of a map."""
_WORDS = 400


def parse(manifest: dict[str, Any], type_: type[Parsed]) -> Parsed:
    """Convert a manifest to a struct of the type. Raises NotUnderstood, with the field that does not fit."""
    try:
        return msgspec.convert(manifest, type_)
    except msgspec.ValidationError as error:
        raise NotUnderstood(manifest.get("kind", ""), manifest["metadata"]["name"], _explained(str(error), manifest, type_)) from error


def deployment_named(adapter: Mapping[str, Any]) -> str:
    """Return the name of the DiffusionDeployment that a LoRAAdapter names; empty where that is not understood."""
    found: Any = adapter
    for step in ("spec", "deploymentRef", "name"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else ""


def _explained(text: str, manifest: Mapping[str, Any], type_: type) -> str:
    """Return the field, what was expected there and what was found, from an error of msgspec."""
    message, place = _PLACE.fullmatch(text).groups()  # type: ignore[union-attr]  # matches any text
    place = place or ""
    if missing := _MISSING.fullmatch(message):
        field = f"{place}.{missing[1]}".lstrip(".")
        return f"{field}: expected a value, found none"
    steps = [_ELEMENT if step.startswith("[") else step for step in _STEP.findall(place)]
    expected, _, found = message.replace("`", "").partition(", got ")
    if allowed := _allowed(inspect.type_info(type_), steps):
        expected = f"expected one of {', '.join(allowed)}"
    found = found or _value_at(manifest, _STEP.findall(place))
    return plain_text(f"{place}: {expected[:1].lower()}{expected[1:]}" + (f", found {found}" if found else ""), _WORDS)


def _allowed(type_: inspect.Type, steps: list[str]) -> list[str]:
    """Return the words that a field may have; empty if it may have other values."""
    if isinstance(type_, inspect.Metadata):
        return _allowed(type_.type, steps)
    if isinstance(type_, inspect.UnionType):
        return next(filter(None, (_allowed(one, steps) for one in type_.types)), [])
    if not steps:
        return [str(one.value) for one in type_.cls] if isinstance(type_, inspect.EnumType) else []
    below: inspect.Type | None = None
    match type_:
        case inspect.StructType(fields=fields):
            below = next((one.type for one in fields if one.encode_name == steps[0]), None)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            below = item
        case inspect.DictType(value_type=value):
            below = value
    return _allowed(below, steps[1:]) if below is not None else []


def _value_at(manifest: Mapping[str, Any], steps: list[str]) -> str:
    """Return a plain value as Python writes it. Empty for a list, for a map, and where a key of a map is not known."""
    found: Any = manifest
    for step in steps:
        try:
            found = found[int(step[1:-1])] if step.startswith("[") else found[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    return repr(found) if isinstance(found, str | int | float) else ""
