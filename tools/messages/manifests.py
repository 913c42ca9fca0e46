# SPDX-License-Identifier: Apache-2.0
"""Texts of manifests: fields of the custom resources, the chart's values, refusals and notes, its alerts and its dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.reference import KINDS, NO_DEFAULT, Field, Schema, default, fields, kind_of, rules

FAIL = re.compile(r'\{\{-?\s*fail\s+(?:\(printf\s+)?"((?:[^"\\]|\\.)*)"')


def fields_of_kinds(folder: Path) -> Iterator[str]:
    """Yield each kind of the CRDs in a folder. Below it are its description, its fields, the messages of its rules, and its columns."""
    for plural in KINDS:
        crd: Schema = yaml.safe_load((folder / f"{plural}.yaml").read_text())
        (version,) = crd["spec"]["versions"]
        schema: Schema = version["schema"]["openAPIV3Schema"]
        kind = crd["spec"]["names"]["kind"]
        yield from (kind, f"    {kind}: {schema['description']}")
        yield from (f"    {_field(row)}" for row in fields(schema) if "description" in row.schema)
        yield from (f"    rule at {at or 'metadata.name'}: {message}" for at, message in rules(schema))
        yield from (f"    column {one['name']}: {one.get('description', '')}" for one in version["additionalPrinterColumns"])


def _field(row: Field) -> str:
    form, start = kind_of(row.schema), default(row)
    about = {NO_DEFAULT: form, "required": f"{form}, required"}.get(start, f"{form}, default {start}").replace("`", "").replace("\\|", "|")
    return f"{row.path} ({about}): {' '.join(row.schema['description'].split())}"


def values(path: Path) -> Iterator[str]:
    """Yield each value of the chart that has a comment right above it, by its path, with its default and that comment."""
    keys: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in path.read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("# "):
            comment.append(line.strip("# "))
        elif key := re.match(r"\s*([\w-]+):\s*(.*)", line):
            keys = [*(one for one in keys if one[0] < indent), (indent, key[1])]
            if comment:
                yield f"{'.'.join(name for _, name in keys)}{f' (default {key[2]})' if key[2] else ''}: {' '.join(comment)}"
            comment = []
        else:
            comment = []


def refusals(folder: Path) -> Iterator[str]:
    """Yield the messages with which the templates of the chart refuse values, in the order of their files."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".tpl"):
            yield from FAIL.findall(path.read_text())


def notes(path: Path) -> Iterator[str]:
    """Yield the paragraphs of the chart's notes, each with the commands below it.

    A line that is only an expression of the template ends a paragraph and is left out.
    """
    with_commands = path.read_text().replace("\n\n  ", "\n  ")
    return filter(None, (" ".join(one.split()) for one in re.split(r"\n\n|^\{\{-[^}]*\}\}$", with_commands, flags=re.MULTILINE)))


def alerts(path: Path) -> Iterator[str]:
    """Yield each alert with its severity and its summary."""
    for group in yaml.safe_load(path.read_text()):
        for rule in group["rules"]:
            yield f"{rule['alert']} ({rule['labels']['severity']}): {rule['annotations']['summary']}"


def panels(path: Path) -> Iterator[str]:
    """Yield the title of each row of the dashboard, and each panel with its title and description."""
    for panel in json.loads(path.read_text())["panels"]:
        yield panel["title"] if panel["type"] == "row" else f"    {panel['title']}: {panel['description']}"
