# SPDX-License-Identifier: Apache-2.0
"""Draw texts for the reading tests of CONTRIBUTING.md, and measure how far docstrings were rewritten.

    python -m tools.reading items              # signatures and docstrings, and texts that users read
    python -m tools.reading pairs REVISION     # docstrings at a revision, and today
    python -m tools.reading kept REVISION      # the share of rewritten docstrings that keep most of their words

The draw depends on the hash of the last commit alone, so nobody chooses.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import click

from tools.messages.entries import entries
from tools.messages.page import PAGE

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("operator/src", "worker/src", "tools", "benchmarks", "tests")
ITEMS, PUBLIC, PAIRS = 60, 20, 20
FIRST_WORDS = 3
MOST_KEPT = 0.85

Place = tuple[str, str]
"""The path of a file from the repository's root, and the qualified name in it."""
Docstring = tuple[str, str]
"""The signature and the text."""


def docstrings(content: str) -> Iterator[tuple[str, Docstring]]:
    """Yield each docstring of a class or function in a source, nested ones too, by its qualified name; the module's own is left out."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Docstring]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                if text := ast.get_docstring(child):
                    yield name, (_signature(child), text)
                yield from below(child, f"{name}.")

    yield from below(ast.parse(content), "")


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def docstrings_now() -> dict[Place, Docstring]:
    """Return all docstrings of classes and functions that FOLDERS have in the working tree, by path and qualified name."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {(path.relative_to(ROOT).as_posix(), name): found for path in paths for name, found in docstrings(path.read_text())}


def docstrings_at(revision: str) -> dict[Place, Docstring]:
    """Return all docstrings of classes and functions that FOLDERS have at a commit, by path and qualified name."""
    listed = _git("ls-tree", "-r", "--name-only", revision, *FOLDERS).splitlines()
    contents = ((path, _git("show", f"{revision}:{path}")) for path in listed if path.endswith(".py"))
    return {(path, name): found for path, content in contents for name, found in docstrings(content)}


def kept_share(before: str, after: str) -> float:
    """Return the share of the old docstring's words, the first three left out, that the new one has in the same order.

    0 if there are no more than three.
    """
    old, new = words(before)[FIRST_WORDS:], words(after)
    same = sum(block.size for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks())
    return same / len(old) if old else 0.0


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return re.findall(r"[\w'-]+", text.lower())


def rewritten(before: Mapping[Place, Docstring], after: Mapping[Place, Docstring]) -> dict[Place, tuple[str, str]]:
    """Return the docstrings of places in both mappings whose words differ, each as a pair of the old and the new text."""
    both = {place: (before[place][1], after[place][1]) for place in before.keys() & after.keys()}
    return {place: pair for place, pair in sorted(both.items()) if words(pair[0]) != words(pair[1])}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _draw() -> Random:
    return Random(_git("rev-parse", "HEAD").strip())


@click.group()
def main() -> None:
    """Draw texts for reading tests, seeded by the hash of the last commit."""


@main.command()
def items() -> None:
    """Print texts for a reader, who says of each what it means; first those that users read."""
    draw = _draw()
    public = [entry for entry in entries(PAGE.read_text()) if len(entry.text.split()) >= FIRST_WORDS]
    for number, entry in enumerate(draw.sample(public, PUBLIC), 1):
        click.echo(f"{number}. {entry}\n")
    own = sorted(docstrings_now().items())
    for number, ((file, name), (signature, text)) in enumerate(draw.sample(own, ITEMS - PUBLIC), PUBLIC + 1):
        click.echo(f"{number}. {file}: {name}\n{signature}\n    {text}\n")


@main.command()
@click.argument("revision")
def pairs(revision: str) -> None:
    """Print docstrings as they were at REVISION and as they are."""
    changed = sorted(rewritten(docstrings_at(revision), docstrings_now()).items())
    for (file, name), (before, after) in _draw().sample(changed, min(PAIRS, len(changed))):
        click.echo(f"{file}: {name}\n  before: {before}\n  after:  {after}\n")


@main.command()
@click.argument("revision")
def kept(revision: str) -> None:
    """Print the share of docstrings rewritten since REVISION that keep 85 % of their words after the third."""
    shares = [kept_share(*pair) for pair in rewritten(docstrings_at(revision), docstrings_now()).values()]
    many = sum(share >= MOST_KEPT for share in shares)
    click.echo(f"{many} of {len(shares)} rewritten docstrings keep at least {MOST_KEPT:.0%} of their words after the third")


if __name__ == "__main__":
    main()
