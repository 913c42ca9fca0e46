# SPDX-License-Identifier: Apache-2.0
"""Texts of manifests: fields of the custom resources, the chart's values, refusals and notes, its alerts and its dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.reference import KINDS, Schema, fields, rules

FAIL = re.compile(r'\{\{-?\s*fail\s+(?:\(printf\s+)?"((?:[^"\\]|\\.)*)"')


def fields_of_kinds(folder: Path) -> Iterator[str]:
    """Yield a line for each kind, field, rule and column of the CRDs in a folder, with its description or message."""
    for plural in KINDS:
        crd: Schema = yaml.safe_load((folder / f"{plural}.yaml").read_text())
        (version,) = crd["spec"]["versions"]
        schema: Schema = version["schema"]["openAPIV3Schema"]
        yield f"{crd['spec']['names']['kind']}: {schema['description']}"
        yield from (f"    {row.path}: {' '.join(row.schema.get('description', '').split())}" for row in fields(schema))
        yield from (f"    rule at {at or 'metadata.name'}: {message}" for at, message in rules(schema))
        yield from (f"    column {one['name']}: {one.get('description', '')}" for one in version["additionalPrinterColumns"])


def values(path: Path) -> Iterator[str]:
    """Yield each value of the chart that has a comment right above it, by its path, with that comment."""
    keys: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in path.read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("# "):
            comment.append(line.strip("# "))
        elif key := re.match(r"\s*([\w-]+):", line):
            keys = [*(one for one in keys if one[0] < indent), (indent, key[1])]
            if comment:
                yield f"{'.'.join(name for _, name in keys)}: {' '.join(comment)}"
            comment = []
        else:
            comment = []


def refusals(folder: Path) -> Iterator[str]:
    """Yield the messages with which the templates of the chart refuse values, in the order of their files."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".tpl"):
            yield from FAIL.findall(path.read_text())


def notes(path: Path) -> Iterator[str]:
    """Yield the lines of the chart's notes; a line that is only an expression of the template is left out."""
    return (line for line in path.read_text().splitlines() if not re.fullmatch(r"\{\{-[^}]*\}\}", line))


def alerts(path: Path) -> Iterator[str]:
    """Yield each alert with its severity and its summary."""
    for group in yaml.safe_load(path.read_text()):
        for rule in group["rules"]:
            yield f"{rule['alert']} ({rule['labels']['severity']}): {rule['annotations']['summary']}"


def panels(path: Path) -> Iterator[str]:
    """Yield the title of each row of the dashboard, and each panel with its title and description."""
    for panel in json.loads(path.read_text())["panels"]:
        yield panel["title"] if panel["type"] == "row" else f"    {panel['title']}: {panel['description']}"
