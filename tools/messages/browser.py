# SPDX-License-Identifier: Apache-2.0
"""Texts of the worker's page in a browser: those of its HTML, and those that its script puts into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

from tools.messages.expressions import is_prose

SHOWN = ("title", "placeholder", "aria-label", "alt")
INLINE = {"code", "span", "a", "em", "strong"}
"""Elements that a text goes through; any other ends it."""
NO_TEXT = {"script", "style"}
EMPTY = {"meta", "link", "input", "img", "br"}
"""Elements without an end tag."""
# A comment, a string or a template, in which a value may hold strings of its own.
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"((?:[^"\\\n]|\\.)*)"|`((?:\$\{[^}]*\}|[^`\\]|\\.)*)`', re.DOTALL)
VALUE = re.compile(r"\$\{([^}]*)\}")
CHOICE = re.compile(r'.*\?\s*"([^"]*)"\s*:\s*"([^"]*)"')
OBJECT = re.compile(r"^const (\w+) = \{", re.MULTILINE)
KEY = re.compile(r'(\w+):\s*(?:\["\w*",\s*)?$')
CONSTANT = re.compile(r'^const (\w+) = "([^"]*)";', re.MULTILINE)
SUM = re.compile(r"\s*\+\s*([A-Z]+)\b")
# A short text that is shown all the same: of an element, or with the mark that ends a sentence.
LABELLED = re.compile(r'(?:element\("\w+", |title: |setText\("[\w-]+", |announce\(|: \["\w+", )$')


def html_texts(content: str) -> Iterator[str]:
    """Yield the texts that a page of HTML shows, each after the name of its element, or of the element and the attribute."""
    reader = _Reader()
    reader.feed(content)
    reader.close()
    yield from reader.texts


class _Reader(HTMLParser):
    """Collects in `texts` the texts of a page that is fed to it, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[str] = []
        self._words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element: end the text before it unless it is inline, and take its attributes that are shown as texts."""
        if tag not in INLINE:
            self._end_text()
        self.texts += [f"{tag} {name}: {value}" for name, value in attrs if name in SHOWN and value]
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """End an element, and with it the text in it unless the element is inline."""
        if tag not in INLINE:
            self._end_text()
        self._open.pop()

    def handle_data(self, data: str) -> None:
        """Add words to the text of the open element; a script's or a style sheet's are dropped."""
        if not NO_TEXT & {*self._open}:
            self._words += data

    def _end_text(self) -> None:
        words = " ".join(self._words.split())
        self._words = ""
        if words:
            self.texts.append(f"{next(tag for tag in reversed(self._open) if tag not in INLINE)}: {words}")


def script_texts(content: str) -> Iterator[str]:
    """Yield the texts of a script, each after the object and the key that hold it; a value is shown by its name in braces."""
    constants = dict(CONSTANT.findall(content))
    objects = [(match.start(), _end_of_object(content, match.end()), match[1]) for match in OBJECT.finditer(content)]
    for token in TOKEN.finditer(content):
        if token[1] is None and token[2] is None:
            continue
        before = content[content.rfind("\n", 0, token.start()) + 1 : token.start()]
        text = VALUE.sub(_value, token[1] if token[1] is not None else token[2])
        key = KEY.search(before)
        if not (is_prose(text) or _is_shown(text, before)) or (key and key[1] == "Authorization"):
            continue
        label = ".".join([name for start, end, name in objects if start < token.start() < end] + ([key[1]] if key else []))
        added = SUM.match(content, token.end())
        rest = f" {constants.get(added[1], f'{{{added[1]}}}')}" if added else ""
        yield (f"{label}: " if label else "") + text.strip() + rest


def _end_of_object(content: str, begin: int) -> int:
    """Return the position where an object literal of JavaScript ends: at the end of its line, or before the next line `};`."""
    line_end = content.index("\n", begin)
    return line_end if content[:line_end].endswith("};") else content.index("\n};", begin)


def _is_shown(text: str, before: str) -> bool:
    """Return whether a text that is no prose is still shown to a reader, judged by the code before it and its marks."""
    if not re.search(r"[A-Za-z]{2}", VALUE.sub("", text)):
        return False
    return LABELLED.search(before) is not None or text.endswith((".", "…")) or re.search(r"[a-z] \{|\} [a-z]|\} ?[(×]", text) is not None


def _value(match: re.Match[str]) -> str:
    expression = match[1]
    if choice := CHOICE.fullmatch(expression):
        return f"{{{choice[1]}|{choice[2]}}}"
    name = re.match(r"[A-Za-z_][\w.]*(?!\w|[.(])", expression)
    return f"{{{name[0] if name else '…'}}}"
