# SPDX-License-Identifier: Apache-2.0
"""Check that what people read is in plain English: docstrings, comments, messages, help, docs and descriptions of fields.

    python -m tools.words           # report each sentence that breaks a rule; part of `make lint`
    python -m tools.words --prune   # drop exceptions whose sentence is gone

The rules are in CONTRIBUTING.md. The exceptions are hashes of sentences written before the rules, in `tools/words_allowed.txt`.
A hash holds no place, so files may move. The list only gets shorter: this program removes hashes and adds none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tools.words_sources import Kind, Text, texts

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "tools" / "words_allowed.txt"
PRUNE = "python -m tools.words --prune"
MOST_WORDS = 25
HASH_DIGITS = 12

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
    """A sentence that breaks a rule: the path from the repository's root, the line where its text begins, the rule."""

    path: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, whitespace folded; a full stop within inline code or an abbreviation ends none."""
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
    """Yield a line for each rule that a sentence breaks; code and URLs count as one word and are not read."""
    plain = _URL.sub("URL", _CODE.sub("CODE", sentence))
    if (opening := _opening(plain, kind)) is not None:
        yield opening
    for word in dict.fromkeys(found.lower() for found in _NOT_IN_USE.findall(plain)):
        yield f"{word!r} is not in use: {NOT_IN_USE[word]}"
    count = sum(any(letter.isalnum() for letter in word) for word in plain.split())
    if count > MOST_WORDS:
        yield f"{count} words, at most {MOST_WORDS}"


def fingerprint(sentence: str) -> str:
    """Return the hash that stands for a sentence in the list of exceptions, the same however its lines are broken."""
    return hashlib.sha256(" ".join(sentence.split()).encode()).hexdigest()[:HASH_DIGITS]


def findings(read: Iterable[Text]) -> Iterator[Finding]:
    """Yield every broken rule of these texts, exceptions included."""
    for text in read:
        for sentence in sentences(text.text):
            for rule in broken_rules(sentence, text.kind):
                yield Finding(text.path, text.line, rule, sentence)


def read_allowed(path: Path = ALLOWED) -> list[str]:
    """Read the list of exceptions; lines that begin with # are for people."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def write_allowed(hashes: Collection[str], path: Path = ALLOWED) -> None:
    """Write the list of exceptions, sorted, below the lines for people that it has."""
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    path.write_text("".join(f"{line}\n" for line in (*comments, *sorted(set(hashes)))))


def judge(found: Sequence[Finding], allowed: Collection[str]) -> tuple[list[Finding], list[str]]:
    """Return the findings without an exception, and the stale exceptions: those whose sentence breaks no rule, or is gone."""
    hashes = {one: fingerprint(one.sentence) for one in found}
    return [one for one in found if hashes[one] not in allowed], sorted(set(allowed) - set(hashes.values()))


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
@click.option("--prune", is_flag=True, help="Remove exceptions whose sentence is gone; add none.")
def main(prune: bool) -> None:
    """Report every sentence that breaks a rule of plain English; exit 1 if there is one."""
    allowed = set(read_allowed())
    broken, stale = judge(list(findings(texts(ROOT))), allowed)
    if prune and stale:
        write_allowed(allowed - set(stale))
        click.echo(f"{ALLOWED.relative_to(ROOT)}: {len(stale)} exceptions removed, {len(allowed) - len(stale)} left")
        stale = []
    for one in broken:
        click.echo(str(one))
    for hash_ in stale:
        click.echo(f"{ALLOWED.relative_to(ROOT)}: stale exception {hash_}: its sentence is gone; remove it with `{PRUNE}`")
    raise SystemExit(1 if broken or stale else 0)


if __name__ == "__main__":
    main()
