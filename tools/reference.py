# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference.md: every field of both kinds, as the CRDs have it.

    python -m tools.reference

The page is a pure function of `crds/`, and a test holds the committed one to it. To change what it says of a field, change the
field's description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
KINDS = ("diffusiondeployments", "loraadapters")
# A description that says so is true for everything below it, until one says otherwise.
REPLACES, KEEPS = "A change replaces the replicas.", "A change does not replace the replicas."
# A description that ends so is true for everything below it; a kind's description says so in RULE.
EXPERIMENTAL = "Experimental."
RULE = "A field is stable unless its description, or that of a field above it, ends with Experimental."
# Fields that Kubernetes documents take one row.
KUBERNETES_OWN = ("The tolerations of the pods", "The affinity of the pods", "Conditions in Kubernetes' form")
INTRODUCTION = """# Reference

Every field of both kinds, written by `python -m tools.reference` from the CRDs; `kubectl explain dd.spec --recursive` says the same.
There are no others, and none is without effect. Some were [not run where they are meant for](support.md#stable-and-experimental-fields),
as on GPUs.
Defaults are in the schema, so `kubectl get -o yaml` shows what will happen; a dash is no default.
A required field must be set if the object around it is. `≤` is the most characters of a string, items of a list or entries of a map.
The API server refuses a value that is out of bounds or breaks a rule, with a message that names the field. *Replaces*: a change makes new
pods, as `rollout` says; everything else reaches the pods that run. *Stable* and *experimental* are [promises about
names, values and meaning](support.md#stable-and-experimental-fields). Conditions and their reasons are in
[troubleshooting](troubleshooting.md), what the objects mean in [concepts](concepts.md), and the routes of a model in
[its HTTP API](http-api.md).
"""
# Regular expressions that a sentence says better.
PATTERNS = {
    "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": "a DNS name",
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "a DNS label",
    "^[a-z]([-a-z0-9]*[a-z0-9])?$": "a DNS label that begins with a letter",
    "^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$": "a quantity",
    "^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$": "small letters, digits, `.`, `_` and `-`",
    "^sha256:[0-9a-f]{64}$": "`sha256:` and 64 hexadecimal digits",
    "^[0-9a-f]{64}$": "64 hexadecimal digits",
    "^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$": "as in `1024x1024`",
    "^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$": "letters, digits, `.`, `_` and `-`",
    "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$": "as in `org/name`",
    "^(none|([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$": "`none`, or a name as in `nvidia.com/gpu`",
    "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$": "a label's value",
    "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": "a label's name",
    "^([A-Za-z_][A-Za-z0-9_]*|[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*)$": "a class or an import path",
}
NO_DEFAULT = "—"
Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A row of a table: the field's path and schema, and marks for a required field, a replacing one, and an experimental one.

    A field replaces if a change of it makes new pods.
    """

    path: str
    schema: Schema
    required: bool
    replaces: bool
    experimental: bool = False


def page(crds: list[Schema]) -> str:
    """Return the text of docs/reference.md for the parsed CRDs; nothing is written."""
    return "\n".join([INTRODUCTION, *(_kind(crd) for crd in crds)])


def fields(schema: Schema, path: str = "", *, replaces: bool = False, experimental: bool = False) -> Iterator[Field]:
    """Yield the fields below a schema, in its order; an object has a row if it has a description."""
    for name, inner in schema.get("properties", {}).items():
        said = inner.get("description", "")
        changed = (replaces or REPLACES in said) and KEEPS not in said
        young = experimental or said.endswith(EXPERIMENTAL)
        here = f"{path}.{name}".removeprefix(".")
        below = inner.get("items", inner)
        deeper = "properties" in below and not said.startswith(KUBERNETES_OWN)
        if said or not deeper:
            yield Field(here, inner, name in schema.get("required", ()), changed, young)
        if deeper:
            yield from fields(below, here if inner is below else f"{here}[]", replaces=changed, experimental=young)


def rules(schema: Schema, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and message of each validation rule of a schema and of all schemas below it."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"]
    for name, inner in schema.get("properties", {}).items():
        yield from rules(inner, f"{path}.{name}")
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]")


def _kind(crd: Schema) -> str:
    names = crd["spec"]["names"]
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    short = " and ".join(f"`{name}`" for name in names["shortNames"])
    lines = [f"## {names['kind']}", "", f"`{crd['spec']['group']}/{version['name']}`, short {short}. {_meaning(schema)}", ""]
    lines += [*_spec_table(list(fields(schema["properties"]["spec"]))), ""]
    lines += [f"### Rules of a {names['kind']}", "", *_rules_table(schema), ""]
    lines += [f"### Status of a {names['kind']}", "", *_status_table(schema["properties"]["status"]), ""]
    lines += [f"### Columns of `kubectl get {names['shortNames'][0]}`", "", *_columns_table(version["additionalPrinterColumns"]), ""]
    return "\n".join(lines)


def _spec_table(rows: list[Field]) -> list[str]:
    """Return the lines of the table of a spec; the column about replaced pods is there only if a change of some field replaces them."""
    replaces = [["yes" if row.replaces else ""] if any(one.replaces for one in rows) else [] for row in rows]
    cells = [[f"`{row.path}`", kind_of(row.schema), default(row), _meaning(row.schema)] for row in rows]
    header = [*["field", "type", "default", "meaning", "replaces"][: 4 + len(replaces[0])], "stability"]
    return _table(header, [[*one, *other, _stability(row)] for row, one, other in zip(rows, cells, replaces, strict=True)])


def _rules_table(schema: Schema) -> list[str]:
    return _table(["at", "message"], [[f"`{at or 'metadata.name'}`", _cell(message)] for at, message in rules(schema)])


def _status_table(schema: Schema) -> list[str]:
    cells = [[f"`{row.path}`", kind_of(row.schema), _meaning(row.schema), _stability(row)] for row in fields(schema)]
    return _table(["field", "type", "meaning", "stability"], cells)


def _columns_table(columns: list[Schema]) -> list[str]:
    names = [one["name"].upper() + (" (wide)" if one.get("priority") else "") for one in columns]
    return _table(["column", "meaning"], [[name, _cell(one.get("description", ""))] for name, one in zip(names, columns, strict=True)])


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(header), _row(["---"] * len(header)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |").rstrip() + " |"


def kind_of(schema: Schema) -> str:
    """Return a field's type, possible values and bounds in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or percentage" if schema.get("pattern", "").endswith("%$") else "quantity"
    match schema.get("type"):
        case "array":
            return f"list{_up_to(schema.get('maxItems'))} of {kind_of(schema['items'])}"
        case "object" if "additionalProperties" in schema:
            return f"map{_up_to(schema.get('maxProperties'))} of {kind_of(schema['additionalProperties'])}"
        case "integer" if "minimum" in schema:
            return f"integer, {schema['minimum']} to {schema['maximum']}" if "maximum" in schema else f"integer from {schema['minimum']}"
        case "string" if schema.get("format") == "date-time":
            return "time"
        case "string":
            return f"string{_up_to(schema.get('maxLength'))}{_form(schema.get('pattern'))}"
        case kind:
            return str(kind)


def _form(pattern: str | None) -> str:
    if pattern is None:
        return ""
    return f", {PATTERNS[pattern]}" if pattern in PATTERNS else f", `{_cell(pattern)}`"


def _up_to(most: int | None) -> str:
    return "" if most is None else f" ≤ {most}"


def _stability(row: Field) -> str:
    return "experimental" if row.experimental else "stable"


def default(row: Field) -> str:
    """Return a field's default in backticks, `NO_DEFAULT`, or the word required."""
    if row.required:
        return "required"
    value = row.schema.get("default")
    if value in (None, {}, ""):
        return NO_DEFAULT
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _meaning(schema: Schema) -> str:
    said = schema.get("description", "")
    for mark in (REPLACES, KEEPS, RULE, EXPERIMENTAL):
        said = said.replace(mark, "")
    return _cell(" ".join(said.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write docs/reference.md from the CRDs, over the old one."""
    PAGE.write_text(page([yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text()) for plural in KINDS]))


if __name__ == "__main__":
    main()
