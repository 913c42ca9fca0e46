# SPDX-License-Identifier: Apache-2.0
"""The reference: it is generated from the CRDs, and its statements about replaced pods are what the operator does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.plan.replicas.revision import template_of
from support.apiserver.kind_api import Document, merged, nested
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
CRDS = [yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text()) for plural in reference.KINDS]


def spec_of(crd: Document) -> Document:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def test_the_committed_page_is_the_one_that_the_crds_give() -> None:
    assert reference.page(CRDS) == (ROOT / "docs" / "reference.md").read_text(), "run: python -m tools.reference"


def test_every_field_of_a_spec_has_its_row_and_every_object_is_said_something_of() -> None:
    for crd in CRDS:
        rows = {row.path: row.schema for row in reference.fields(spec_of(crd))}
        obvious = (".name", ".value", ".key")
        assert [path for path, schema in rows.items() if not schema.get("description") and not path.endswith(obvious)] == []


def test_each_experimental_field_has_its_reason_on_the_page_of_support() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    explained = re.findall(r"^\| (DiffusionDeployment|LoRAAdapter) \| `([^`]+)` \| \S.*\|$", page, re.MULTILINE)
    marked = [(crd["spec"]["names"]["kind"], path) for crd in CRDS for path in _marked_experimental(crd)]
    assert explained == marked


def _marked_experimental(crd: Document) -> list[str]:
    """Return the paths of the fields whose own description says that they are experimental, without those below them."""
    rows = list(reference.fields(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    return [row.path for row in rows if reference.EXPERIMENTAL in row.schema.get("description", "")]


def test_fields_below_an_experimental_one_are_experimental_too_and_others_stable() -> None:
    rows = {row.path: row.experimental for row in reference.fields(spec_of(CRDS[0]))}
    below = [path for path in rows if path.startswith("resources.claims")]
    assert len(below) > 1 and all(rows[path] for path in below)
    assert not rows["resources"] and not rows["resources.limits"]


def test_each_kind_says_how_its_fields_are_marked_and_a_mark_is_the_last_sentence() -> None:
    for crd in CRDS:
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert schema["description"].endswith(reference.RULE)
        said = [row.schema.get("description", "") for row in reference.fields(schema)]
        assert [one for one in said if reference.EXPERIMENTAL in one and not one.endswith(reference.EXPERIMENTAL)] == []


# Effects of a change of each field


def leaves(schema: Document, *, replaces: bool = False, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Document, bool]]:
    """Yield the path and schema of each field that has no fields below it.

    Beside them stands whether a change of it replaces pods, by its description or the nearest one above it that says so.
    """
    said = schema.get("description", "")
    replaces = (replaces or reference.REPLACES in said) and reference.KEEPS not in said
    if "properties" not in schema:
        yield path, schema, replaces
    for name, inner in schema.get("properties", {}).items():
        yield from leaves(inner, replaces=replaces, path=(*path, name))


def two_values(schema: Document) -> tuple[Any, Any]:
    if "enum" in schema:
        return schema["enum"][0], schema["enum"][-1]
    match schema.get("type"):
        case "integer":
            return schema["minimum"], schema["maximum"]
        case "boolean":
            return True, False
        case "array":
            return [], [smallest(schema["items"])]
        case "object":
            one, other = two_values(schema.get("additionalProperties", {}))
            return {"a": one}, {"a": other}
        case _:
            return "1", "2"


def smallest(schema: Document) -> Any:
    """Return a value that a schema accepts, with all required fields and no other."""
    if "properties" not in schema:
        return two_values(schema)[0]
    return {name: smallest(schema["properties"][name]) for name in schema.get("required", ())}


def revision(path: tuple[str, ...], value: Any) -> str:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = merged({"model": {"source": {"path": "/m"}}, "service": {"apiKeySecret": {"name": "s"}}}, nested(path, value))
    return template_of(msgspec.convert({"metadata": metadata, "spec": spec}, DiffusionDeployment), default_image="i").revision


# A union's members exclude each other, and a served name never changes.
CHANGEABLE = [leaf for leaf in leaves(spec_of(CRDS[0])) if leaf[0][:2] != ("model", "source") and leaf[0] != ("servedName",)]


@pytest.mark.parametrize(("path", "schema", "replaces"), CHANGEABLE, ids=[".".join(leaf[0]) for leaf in CHANGEABLE])
def test_a_change_replaces_the_pods_exactly_where_the_description_says_so(path: tuple[str, ...], schema: Document, replaces: bool) -> None:
    one, other = two_values(schema)
    assert (revision(path, one) != revision(path, other)) is replaces


def test_another_source_replaces_the_pods() -> None:
    assert revision(("model", "source", "path"), "/a") != revision(("model", "source", "path"), "/b")


def test_every_field_of_both_kinds_has_a_description() -> None:
    """Look for fields without a description; only `metadata` has none, because the API server allows none there."""
    roots = {crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in CRDS}
    silent = [f"{kind}{path}" for kind, root in roots.items() for path in _silent(root)]
    assert silent == ["DiffusionDeployment.metadata", "LoRAAdapter.metadata"]


def _silent(schema: Document, path: str = "") -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        if not inner.get("description"):
            yield f"{path}.{name}"
        yield from _silent(inner, f"{path}.{name}")
    for below in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(below, dict):
            yield from _silent(below, f"{path}[]")
