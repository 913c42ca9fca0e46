# SPDX-License-Identifier: Apache-2.0
"""Write docs/development/messages.txt: every text that users read, to be read as a whole.

    python -m tools.messages

The file is a function of the sources, the command lines, the CRDs and the chart's values. A test holds the committed one to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import click
import yaml

from tools.messages_sources import Kind, Message, Package
from tools.reference import KINDS, Schema, fields, rules

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "development" / "messages.txt"
VALUES = ROOT / "charts" / "diffusion-operator" / "values.yaml"
HELP_WIDTH = 140
INTRODUCTION = """\
Every text that users read, written by `python -m tools.messages` from the sources; do not edit.

A value in a text is shown by its name in braces, and {a|b} is either of two texts. A line `{name} = …` is a text that others hold by this
name. A condition or an Event begins with its type and reason, an error with its code or class, and a log line with its level.
"""


def page() -> str:
    """Return the whole file."""
    return "\n".join([INTRODUCTION, *map(part, PARTS)])


@cache
def part(name: str) -> str:
    """Return a part of the file by its name in `PARTS`."""
    return "\n".join(PARTS[name]())


def _helps() -> Iterator[str]:
    """Yield the help of each command, as the terminal shows it."""
    from diffusion_operator.__main__ import main as operator
    from diffusion_worker.cli import cli as worker

    for program, command in {"diffusion-operator": operator, "diffusion-worker": worker}.items():
        for name, inner in _commands(program, command):
            with click.Context(inner, info_name=name, terminal_width=HELP_WIDTH, max_content_width=HELP_WIDTH) as context:
                yield _section(f"{name} --help", inner.get_help(context).splitlines())


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for below, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _commands(f"{name} {below}", inner)


def _manifests() -> Iterator[str]:
    """Yield the fields of the custom resources and the values of the chart."""
    yield _section("Fields of the custom resources", _fields())
    yield _section("Values of the chart", _values())


def _fields() -> Iterator[str]:
    for plural in KINDS:
        crd: Schema = yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text())
        (version,) = crd["spec"]["versions"]
        schema: Schema = version["schema"]["openAPIV3Schema"]
        yield f"{crd['spec']['names']['kind']}: {schema['description']}"
        yield from (f"    {row.path}: {' '.join(row.schema.get('description', '').split())}" for row in fields(schema))
        yield from (f"    rule at {at or 'metadata.name'}: {message}" for at, message in rules(schema))
        yield from (f"    column {one['name']}: {one.get('description', '')}" for one in version["additionalPrinterColumns"])


def _values() -> Iterator[str]:
    """Yield each value of the chart with the comment above it."""
    keys: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in VALUES.read_text().splitlines():
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


def _messages(program: str, folder: str, default: Kind) -> Iterator[str]:
    """Yield the messages of a program, by kind and file."""
    by_path = Package(ROOT / folder, default).messages()
    for kind in Kind:
        lines: list[str] = []
        for path, messages in by_path.items():
            if texts := [one for one in messages if one.kind is kind]:
                lines += ["", f"{folder}/{path}", *_indented(texts)]
        if lines:
            yield _section(f"{kind} of the {program}", lines[1:])


def _indented(messages: Iterable[Message]) -> Iterator[str]:
    return (f"    {' '.join(line.split())}" for line in dict.fromkeys(map(str, messages)))


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"== {title} ==", "", *(line.rstrip() for line in lines), ""])


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "help": _helps,
    "fields and values": _manifests,
    "operator": lambda: _messages("operator", "operator/src/diffusion_operator", Kind.CONDITION),
    "worker": lambda: _messages("worker", "worker/src/diffusion_worker", Kind.ERROR),
}


def main() -> None:
    """Write the file."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
