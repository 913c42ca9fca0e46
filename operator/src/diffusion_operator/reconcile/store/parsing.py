# SPDX-License-Identifier: Apache-2.0
"""Manifests to structs at the edge: after this, structs only."""

from typing import Any, TypeVar

import msgspec

from diffusion_operator.errors import OperatorError

Parsed = TypeVar("Parsed")


def parse(manifest: dict[str, Any], type_: type[Parsed]) -> Parsed:
    try:
        return msgspec.convert(manifest, type_)
    except msgspec.ValidationError as error:
        name = manifest.get("metadata", {}).get("name")
        raise OperatorError(f"{manifest.get('kind')} {name} is not understood: {error}") from error
