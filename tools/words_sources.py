# SPDX-License-Identifier: Apache-2.0
"""Texts for `tools.words`: prose of Python, Markdown, YAML, the page and files with # comments, with the line where each begins."""

from __future__ import annotations

import ast
import enum
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

SOURCES = ("operator", "worker", "tools", "benchmarks", "examples", "docs", "crds", "charts", "tests")
# Messages and strings of these are not read: a test's strings are data, and the captions of the digits are a model's training.
ONLY_DOCSTRINGS_AND_COMMENTS = ("tests/", "examples/")
DESCRIBING = {"help", "description", "message", "summary", "epilog", "short_help", "documentation", "reason", "note"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
NO_PROSE = re.compile(r"#\s*(?:!|noqa\b|type:|fmt:|pragma\b|SPDX-|ruff:|mypy:|-\*-)")
# A string with fewer words is a name, a key or a part of a message.
FEWEST_WORDS = 3

_FENCE = re.compile(r"^\s*(?:```|~~~)")
_HEADING = re.compile(r"^#{1,6}\s+(?P<text>.*?)\s*#*$")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+(?P<text>.*)$")
_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\([^)]*\)")
_SECTION = re.compile(r"^(?:Raises|Args|Returns|Yields|Attributes|Example|Examples):$")
_FIELD = re.compile(r"^\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?:\s+(?P<text>.*)$")


class Kind(enum.Enum):
    """The form of a text, because some rules are about one form alone."""

    PROSE = enum.auto()
    HEADING = enum.auto()
    STRING = enum.auto()
    """A string of the code that may be a part of a message: only a capital letter makes it the start of a sentence."""


@dataclass(frozen=True)
class Text:
    """A paragraph, comment or other piece of prose. `path` is relative to the repository's root; `line` is the first line of the piece."""

    path: str
    line: int
    text: str
    kind: Kind = Kind.PROSE


def texts(root: Path) -> Iterator[Text]:
    """Yield all prose of the repository at `root`."""
    for path in _files(root):
        yield from texts_of(path.read_text(), path.relative_to(root).as_posix())


def texts_of(content: str, path: str) -> list[Text]:
    """Return the prose of one file; its name decides how it is read. Empty for a kind of file that is not read."""
    reader = _reader(path)
    return [] if reader is None else list(reader(content, path))


def _reader(path: str) -> Callable[[str, str], Iterator[Text]] | None:
    name = Path(path).name
    if name.startswith(("Makefile", "Dockerfile", "make-venv")):
        return _hash_comments
    if name == "values.schema.json":
        return _yaml
    readers = {".py": _python, ".md": _markdown, ".yaml": _yaml, ".js": _page, ".html": _page, ".toml": _hash_comments}
    return readers.get(Path(path).suffix)


def _files(root: Path) -> Iterator[Path]:
    hidden = {".venv", "__pycache__", "node_modules"}
    folders = (path for name in SOURCES for path in (root / name).rglob("*") if not hidden & set(path.parts))
    for path in sorted((*root.iterdir(), *folders)):
        if path.is_file() and _reader(path.as_posix()) is not None:
            yield path


# Python


def _python(content: str, path: str) -> Iterator[Text]:
    tree = ast.parse(content)
    docstrings = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Expr) and _literal_only(node)}
    for node in docstrings.values():
        yield from _docstring(node, path)
    yield from _comments(content, path)
    if not path.startswith(ONLY_DOCSTRINGS_AND_COMMENTS):
        yield from _strings(tree, path, set(docstrings), message=False)


def _literal_only(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _docstring(node: ast.Expr, path: str) -> Iterator[Text]:
    """Yield a docstring's paragraphs, items of its lists, and entries of its sections without their names."""
    assert isinstance(node.value, ast.Constant)
    paragraphs = _Paragraphs(path)
    in_section = False
    for number, line in enumerate(inspect.cleandoc(str(node.value.value)).splitlines(), node.lineno):
        stripped = line.strip()
        indented = line.startswith(" ")
        in_section = bool(_SECTION.match(stripped)) or (in_section and (indented or not stripped))
        entry = _FIELD.match(stripped) if in_section else _ITEM.match(line)
        if not stripped or _SECTION.match(stripped) or stripped.startswith(">>>"):
            paragraphs.end()
        elif entry is not None:
            paragraphs.begin(number, entry["text"])
        elif in_section or not line.startswith("    "):  # deeper is code
            paragraphs.add(number, stripped)
    yield from paragraphs.all()


def _comments(content: str, path: str) -> Iterator[Text]:
    """Yield a comment at a line's end by itself, and lines of nothing else together."""
    paragraphs = _Paragraphs(path)
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type != tokenize.COMMENT or NO_PROSE.match(token.string):
            continue
        row, alone = token.start[0], not token.line[: token.start[1]].strip()
        if not alone or row != last + 1:
            paragraphs.end()
        text = token.string.lstrip("#:").strip()
        if text:
            paragraphs.add(row, text)
        last = row if alone and text else 0
    yield from paragraphs.all()


def _strings(node: ast.AST, path: str, seen: set[int], *, message: bool) -> Iterator[Text]:
    """Yield the strings below a node that are prose; strings in `seen` are left out.

    `message` says that the node is part of a text for users, such as an error or help. Such strings may be shorter.
    """
    if id(node) in seen:
        return
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and (text := _literal(node)) is not None:
        if len(text.split()) >= (2 if message else FEWEST_WORDS) and (message or "\n" not in text):
            yield Text(path, getattr(node, "lineno", 1), text, Kind.PROSE if message else Kind.STRING)
        for inner in ast.walk(node):
            if isinstance(inner, ast.FormattedValue):
                yield from _strings(inner.value, path, seen, message=False)
        return
    message = message or isinstance(node, ast.Raise) or _logs(node)
    for child in ast.iter_child_nodes(node):
        describes = isinstance(child, ast.keyword) and child.arg in DESCRIBING
        yield from _strings(child, path, seen, message=message or describes)


def _literal(node: ast.AST) -> str | None:
    """Return the words of a string, an f-string or a sum with one, with {} for each value in it; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def is_text(node: ast.AST) -> bool:
    """Return whether an expression is a literal string, an f-string, or a sum with one."""
    return _literal(node) is not None


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS


# Other files


def _markdown(content: str, path: str) -> Iterator[Text]:
    """Yield paragraphs, items, headings and cells of tables; blocks of code are no prose."""
    paragraphs = _Paragraphs(path)
    in_code = False
    for number, line in enumerate(content.splitlines(), 1):
        if _FENCE.match(line):
            in_code = not in_code
            paragraphs.end()
        elif in_code:
            continue
        elif not line.strip() or line.lstrip().startswith("<!--"):
            paragraphs.end()
        elif heading := _HEADING.match(line):
            paragraphs.begin(number, _linked(heading["text"]), Kind.HEADING)
            paragraphs.end()
        elif line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                if re.search(r"[A-Za-z]", cell):
                    paragraphs.begin(number, _linked(cell.strip()))
            paragraphs.end()
        elif item := _ITEM.match(line):
            paragraphs.begin(number, _linked(item["text"]))
        else:
            paragraphs.add(number, _linked(line.strip()))
    yield from paragraphs.all()


def _linked(text: str) -> str:
    return _LINK.sub(lambda found: found["text"], text)


def _yaml(content: str, path: str) -> Iterator[Text]:
    """Yield the comments, and the values of keys such as `description` or `summary`; of a template of helm only the comments."""
    yield from _hash_comments(content, path)
    if "/templates/" in path:
        return
    for document in yaml.compose_all(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        yield from _described(document, path)


def _described(node: yaml.Node | None, path: str) -> Iterator[Text]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _described(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(value, yaml.ScalarNode) and key.value in DESCRIBING:
            yield Text(path, value.start_mark.line + 1, value.value)
        yield from _described(value, path)


def _hash_comments(content: str, path: str) -> Iterator[Text]:
    paragraphs = _Paragraphs(path)
    for number, line in enumerate(content.splitlines(), 1):
        before, mark, comment = line.partition("##" if "## " in line else "#")
        if not mark or NO_PROSE.match(f"#{comment}") or (before.strip() and not before[-1].isspace()) or not comment.startswith(" "):
            paragraphs.end()
        elif before.strip():
            paragraphs.begin(number, comment.strip())
            paragraphs.end()
        else:
            paragraphs.add(number, comment.strip())
    yield from paragraphs.all()


def _page(content: str, path: str) -> Iterator[Text]:
    """Yield the texts in an HTML file of the page, or the comments and strings of a script, if they have at least three words."""
    for number, line in enumerate(content.splitlines(), 1):
        if path.endswith(".html"):
            shown = [*re.findall(r">([^<>]+)<", line), *re.findall(r'(?:title|placeholder|aria-label|alt)="([^"]*)"', line)]
        else:
            shown = [*re.findall(r"(?:^|\s)//\s+(.*)$", line), *re.findall(r'"([^"\\]*)"', line), *re.findall(r"`([^`]*)`", line)]
        for text in shown:
            if len(text.split()) >= FEWEST_WORDS:
                yield Text(path, number, text.strip(), Kind.STRING)


class _Paragraphs:
    """Joins lines of a file to paragraphs. `begin` and `add` take a line; `all` returns each paragraph as a `Text`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._texts: list[Text] = []
        self._lines: list[str] = []
        self._from = 0
        self._kind = Kind.PROSE

    def begin(self, line: int, text: str, kind: Kind = Kind.PROSE) -> None:
        """End the text so far, and begin another one at this line."""
        self.end()
        self._kind = kind
        self.add(line, text)

    def add(self, line: int, text: str) -> None:
        """Append a line to the current paragraph; if there is none, start a paragraph at `line`."""
        self._from = self._from if self._lines else line
        self._lines.append(text)

    def end(self) -> None:
        """End the text so far; do nothing if there is none."""
        if self._lines:
            self._texts.append(Text(self._path, self._from, "\n".join(self._lines), self._kind))
        self._lines, self._kind = [], Kind.PROSE

    def all(self) -> list[Text]:
        """Close the current paragraph, and return every paragraph in the order of the lines."""
        self.end()
        return self._texts
