# SPDX-License-Identifier: Apache-2.0
"""Check that what people read is in plain English: docstrings, comments, messages, help, docs and descriptions of fields.

    python -m tools.words   # report each sentence that breaks a rule; part of `make lint`

The rules are in CONTRIBUTING.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tools.words_sources import Kind, Text, texts

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 25

OPENERS = ("What", "Whether", "Which", "Who", "Why", "How", "Where", "One", "That", "Of", "By", "Its", "As")
BEFORE_OPENERS = ("Tells", "Says", "Gives", "Shows")
NOT_IN_USE = {
    "told": "say who reports or notifies whom",
    "anew": "write again, or from the start",
    "whoever": "name who it is",
    "of ours": "write our, or name its owner",
    "another hand": "name who it is, such as another client",
    "picture": "write image",
    "pictures": "write images",
}

_OPENER = re.compile(rf"(?:(?P<before>{'|'.join(BEFORE_OPENERS)})\s+)?(?P<opener>{'|'.join(OPENERS)})\b(?!-)", re.IGNORECASE)
_NOT_IN_USE = re.compile(rf"(?<![\w-])({'|'.join(NOT_IN_USE)})(?![\w-])", re.IGNORECASE)
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_URL = re.compile(r"\b[a-z][a-z0-9+]*://\S+")
_MARKUP = " \t*_(\"'“‘[>|~"
_END = re.compile(r"(?<=[.!?])[\"')*_”\]]*\s+(?=[\"'(*_“\[]*[A-Z\d\ue000])")
_NO_END = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|approx)|\.\.)\.$", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A rule broken by a sentence. `path` is relative to the repository's root; `line` is where the surrounding text begins."""

    path: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences, and reduce each run of whitespace to one space.

    Full stops in inline code, URLs and abbreviations do not split.
    """
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"\ue000{len(hidden) - 1}\ue001"

    folded = " ".join(_URL.sub(hide, _CODE.sub(hide, text)).split())
    begun = ""
    for part in _END.split(folded):
        begun = f"{begun} {part}".strip()
        if _NO_END.search(begun):
            continue
        yield _shown(begun, hidden)
        begun = ""
    if begun:
        yield _shown(begun, hidden)


def broken_rules(sentence: str, kind: Kind) -> Iterator[str]:
    """Check a sentence against the rules, and yield a message for each that it breaks.

    Inline code or a URL counts as a single word, whose content is not checked.
    """
    plain = _URL.sub("URL", _CODE.sub("CODE", sentence))
    if (opening := _opening(plain, kind)) is not None:
        yield opening
    for word in dict.fromkeys(found.lower() for found in _NOT_IN_USE.findall(plain)):
        yield f"{word!r} is not in use: {NOT_IN_USE[word]}"
    count = sum(any(letter.isalnum() for letter in word) for word in plain.split())
    if count > MOST_WORDS:
        yield f"{count} words, at most {MOST_WORDS}"


def findings(read: Iterable[Text]) -> Iterator[Finding]:
    """Yield a finding for each rule that a sentence of these texts breaks."""
    for text in read:
        for sentence in sentences(text.text):
            for rule in broken_rules(sentence, text.kind):
                yield Finding(text.path, text.line, rule, sentence)


def _shown(text: str, hidden: Sequence[str]) -> str:
    return re.sub("\ue000(\\d+)\ue001", lambda found: hidden[int(found[1])], text)


def _opening(plain: str, kind: Kind) -> str | None:
    start = plain.lstrip(_MARKUP)
    if kind is Kind.HEADING and start.rstrip(_MARKUP).endswith("?"):
        return None  # readers search for their question
    found = _OPENER.match(start)
    if found is None or (kind is Kind.STRING and not start[0].isupper()):
        return None
    return f"opens with {found[0]!r}"


@click.command()
def main() -> None:
    """Report every sentence that breaks a rule of plain English; exit 1 if there is one."""
    found = list(findings(texts(ROOT)))
    for one in found:
        click.echo(str(one))
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
