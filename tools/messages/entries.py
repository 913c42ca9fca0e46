# SPDX-License-Identifier: Apache-2.0
"""Whole texts of the page of messages, as a user meets them: each with its parts, and with the place where it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SECTION = re.compile(r"== (.*) ==")
PART = re.compile(r"\{(\w+)\} = (.*)")
CODED = re.compile(r"[A-Z]\w+…?: ")
HOLE = re.compile(r"\{(\w+)\}")

Parts = Mapping[str, Sequence[str]]
"""The texts of one file that others hold by a name, by that name."""


@dataclass(frozen=True)
class Entry:
    """A text of the page: its section, the heading above it, which may be empty, and the text itself."""

    section: str
    heading: str
    text: str

    def __str__(self) -> str:
        return " / ".join(filter(None, (self.section, self.heading))) + f"\n    {self.text}"


def entries(page: str) -> list[Entry]:
    """Return the texts of a page of messages in its order. A text that another of the same file holds comes within that one only.

    Other parts of one name come as one text.
    """
    lines = list(_lines(page))
    parts: dict[str, dict[str, list[str]]] = {}
    for one in lines:
        if part := PART.fullmatch(one.text):
            parts.setdefault(one.heading, {}).setdefault(part[1], []).append(part[2])
    texts: dict[str, list[str]] = {}
    for one in lines:
        texts.setdefault(one.heading, []).append(one.text)
    found = (_whole(one, parts.get(one.heading, {}), texts[one.heading]) for one in lines)
    return list(dict.fromkeys(one for one in found if one is not None))


def _lines(page: str) -> Iterator[Entry]:
    section = heading = ""
    lines = page.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if title := SECTION.fullmatch(line):
            section, heading = title[1], ""
        elif line.startswith("    "):
            yield Entry(section, heading, line.strip())
        elif after.startswith("    "):
            heading = line
        elif section and line:
            yield Entry(section, "", line)


def _whole(entry: Entry, parts: Parts, texts: Sequence[str]) -> Entry | None:
    """Return an entry with the parts that it holds; None for a part that another text of its file holds."""
    part = PART.fullmatch(entry.text)
    if part is None:
        return Entry(entry.section, entry.heading, _filled(entry.text, parts, ()))
    name, text = part.groups()
    if any(f"{{{name}}}" in other.removeprefix(f"{{{name}}} = ") or text in other for other in texts if other != entry.text):
        return None
    if CODED.match(text):
        return Entry(entry.section, entry.heading, _filled(text, parts, (name,)))
    alike = [_filled(one, parts, (name,)) for one in parts[name] if not CODED.match(one)]
    return Entry(entry.section, entry.heading, f"a part of a message, {name}: {' | '.join(alike)}")


def _filled(text: str, parts: Parts, within: Sequence[str]) -> str:
    def fill(hole: re.Match[str]) -> str:
        name = hole[1]
        if name in within or name not in parts:
            return hole[0]
        inner = [_filled(one, parts, (*within, name)) for one in parts[name]]
        return inner[0] if len(inner) == 1 else f"{{{'|'.join(inner)}}}"

    return HOLE.sub(fill, text)
