# SPDX-License-Identifier: Apache-2.0
"""The page of all messages, docs/development/messages.txt, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tools.messages import browser, manifests
from tools.messages.commands import helps
from tools.messages.message import Kind, Message
from tools.messages.python import Package

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development" / "messages.txt"
INTRODUCTION = """\
Every text that users read, written by `python -m tools.messages` from the sources; do not edit.

Each line is one text, below the file, the kind or the command that it belongs to. A value in a text is shown by its name in braces, and
{a|b} is either of two texts. A line `{name} = …` is a part of other texts, which hold it by this name. An option begins with its name, a
field with its path, its type and its default. A condition or an Event begins with its type and reason, an error with its code or class, a
log line with its level, and a metric with its name and type.
"""


def page() -> str:
    """Build the text of the whole file of messages from the sources and return it; nothing is written."""
    return "\n".join([INTRODUCTION, *map(part, PARTS)])


@cache
def part(name: str) -> str:
    """Build one part of the file, by its name in `PARTS`, and return its text; a second call returns the same."""
    return "\n".join(_section(title, lines) for title, lines in PARTS[name]())


def _manifests() -> Iterator[tuple[str, Iterable[str]]]:
    yield "Fields of the custom resources", manifests.fields_of_kinds(ROOT / "crds")
    chart = ROOT / "charts" / "diffusion-operator"
    yield "Values of the chart", manifests.values(chart / "values.yaml")
    yield "Refusals of the chart", manifests.refusals(chart / "templates")
    yield "Notes after an installation of the chart", manifests.notes(chart / "templates" / "NOTES.txt")
    yield "Alerts", manifests.alerts(chart / "files" / "alerts.yaml")
    yield "Panels of the dashboard", manifests.panels(chart / "files" / "dashboard.json")


def _worker_page() -> Iterator[tuple[str, Iterable[str]]]:
    folder = ROOT / "worker" / "src" / "diffusion_worker" / "server" / "page"
    yield "The worker's page", browser.html_texts((folder / "page.html").read_text())
    yield "Texts of the worker's page that come and go", browser.script_texts((folder / "page.js").read_text())


def _messages(program: str, folder: str, default: Kind) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield, for each kind of message that a program has, a title and the lines: the files, and the messages below each."""
    by_path = Package(ROOT / folder, default).messages()
    for kind in Kind:
        lines: list[str] = []
        for path, messages in by_path.items():
            if texts := [one for one in messages if one.kind is kind]:
                lines += ["", f"{folder}/{path}", *_indented(texts)]
        if lines:
            yield f"{kind} of the {program}", lines[1:]


def _indented(messages: Iterable[Message]) -> Iterator[str]:
    return (f"    {' '.join(line.split())}" for line in dict.fromkeys(map(str, messages)))


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"== {title} ==", "", *(line.rstrip() for line in lines), ""])


PARTS: dict[str, Callable[[], Iterable[tuple[str, Iterable[str]]]]] = {
    "help": helps,
    "manifests": _manifests,
    "operator": lambda: _messages("operator", "operator/src/diffusion_operator", Kind.CONDITION),
    "worker": lambda: _messages("worker", "worker/src/diffusion_worker", Kind.ERROR),
    "page": _worker_page,
}
