# SPDX-License-Identifier: Apache-2.0
"""The fields of the operator's structs and of the schemas: the same names, defaults, enums and kinds of values."""

from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from diffusion_operator.api.adapter import AdapterSpec, AdapterStatus
from diffusion_operator.api.deployment_spec import DeploymentSpec
from diffusion_operator.api.deployment_status import DeploymentStatus

CRDS = Path(__file__).resolve().parents[2] / "crds"
Schema = dict[str, Any]


def schema(file: str, part: str) -> Schema:
    (version,) = yaml.safe_load((CRDS / file).read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"][part]


PAIRS = [
    ("diffusiondeployments.yaml", "spec", DeploymentSpec),
    ("diffusiondeployments.yaml", "status", DeploymentStatus),
    ("loraadapters.yaml", "spec", AdapterSpec),
    ("loraadapters.yaml", "status", AdapterStatus),
]


def differences(struct: type[msgspec.Struct], schema: Schema, path: str) -> list[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    one_sided = sorted(fields.keys() ^ schema["properties"].keys())
    found = [f"{path}: {one_sided} on one side only"] if one_sided else []
    for name in fields.keys() & schema["properties"].keys():
        found += field_differences(fields[name], schema["properties"][name], f"{path}.{name}")
    required = {name for name, field in fields.items() if field.required}
    if required != set(schema.get("required", ())):
        found.append(f"{path}: required {sorted(required)} and {schema.get('required')}")
    return found


def field_differences(field: msgspec.structs.FieldInfo, schema: Schema, path: str) -> list[str]:
    found = []
    for inner in struct_types(field.type):
        found += differences(inner, schema.get("items", schema), path)
    enums = [one for one in plain_types(field.type) if isinstance(one, type) and issubclass(one, Enum)]
    allowed = schema.get("items", schema).get("enum")
    if enums and {member.value for member in enums[0]} != set(allowed or ()):
        found.append(f"{path}: enum {sorted(member.value for member in enums[0])} and {allowed}")
    default = msgspec.to_builtins(field.default) if field.default is not msgspec.NODEFAULT else None
    if "default" in schema and schema["type" if "type" in schema else "default"] != "object" and default != schema["default"]:
        found.append(f"{path}: default {default!r} and {schema['default']!r}")
    return found


def plain_types(annotation: Any) -> list[Any]:
    """Flatten a field's annotation to its innermost types, without None and `...`; a dict stays whole."""
    arguments = [one for one in getattr(annotation, "__args__", ()) if one not in (type(None), ...)]
    if getattr(annotation, "__origin__", None) is dict or not arguments:
        return [annotation]
    return [plain for one in arguments for plain in plain_types(one)]


def struct_types(annotation: Any) -> list[type[msgspec.Struct]]:
    return [one for one in plain_types(annotation) if isinstance(one, type) and issubclass(one, msgspec.Struct)]


@pytest.mark.parametrize(("file", "part", "struct"), PAIRS)
def test_struct_and_schema_have_the_same_fields(file: str, part: str, struct: type[msgspec.Struct]) -> None:
    assert differences(struct, schema(file, part), part) == []


def bounds(schema: Schema, path: str) -> list[str]:
    """List a schema's faults below a path, a line each.

    Faults are strings, lists and maps without a bound, lists without a merge type, and defaults whose parent has none.
    """
    found = []
    kind = schema.get("type")
    if kind == "string" and "enum" not in schema and "maxLength" not in schema and schema.get("format") != "date-time":
        found.append(f"{path}: no maxLength")
    if kind == "array" and ("maxItems" not in schema or "x-kubernetes-list-type" not in schema):
        found.append(f"{path}: no maxItems or no list type")
    if "additionalProperties" in schema and "maxProperties" not in schema:
        found.append(f"{path}: no maxProperties")
    inner_defaults = any("default" in one for one in schema.get("properties", {}).values())
    if inner_defaults and "default" not in schema and "required" not in schema and path.count(".") > 0:
        found.append(f"{path}: inner defaults need a default on the parent, which needs nothing else")
    for name, inner in schema.get("properties", {}).items():
        found += bounds(inner, f"{path}.{name}")
    return found + (bounds(schema["items"], f"{path}.items") if "items" in schema else [])


@pytest.mark.parametrize("file", ["diffusiondeployments.yaml", "loraadapters.yaml"])
@pytest.mark.parametrize("part", ["spec", "status"])
def test_everything_is_bounded_and_every_spec_default_applies(file: str, part: str) -> None:
    assert bounds(schema(file, part), part) == []
