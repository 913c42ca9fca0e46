# SPDX-License-Identifier: Apache-2.0
"""Python sources as syntax trees, and the private names of libraries in our sources: imports, attributes and strings with one underscore.

An attribute of an object counts as a library's where no name in our sources is the same. A library's name that our sources use for
something else is missed.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "worker" / "src", ROOT / "operator" / "src")
OURS = ("diffusion_worker", "diffusion_operator")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
NAMES = re.compile(r"\w+(\.\w+)*")


def parse(source: str) -> ast.Module:
    """Parse a source, and retry where CPython 3.11 fails with `SystemError` (python/cpython#106905).

    The parser counts one depth for the whole process. A finalizer may format a traceback in between, which parses too.
    """
    for _ in range(9):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def used_names() -> dict[str, set[str]]:
    """Return the private names that our sources use, each with the sources that do so, as paths from the root. They begin with the
    library, or with a dot when it is unknown."""
    trees = {path: parse(path.read_text()) for folder in SOURCES for path in sorted(folder.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _used(tree, ours):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def names_of_torch() -> set[str]:
    """Return the names of torch that the worker's source writes out, such as `torch.cuda.Stream`."""
    found: set[str] = set()
    for path in sorted((ROOT / "worker" / "src").rglob("*.py")):
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                found |= {f"{node.module}.{item.name}" for item in node.names}
            elif isinstance(node, ast.Attribute) and re.match(r"torch\.[\w.]+$", name := ast.unparse(node)):
                found.add(name)
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def _used(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        imported: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            imported = [(item.name, item.asname) for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(OURS):
            imported = [(f"{node.module}.{item.name}", item.asname or item.name) for item in node.names]
        for full, name in imported:
            root = full.partition(".")[0]
            roots[name or root] = full if name else root
            if any(map(PRIVATE.fullmatch, full.split("."))):
                yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots and NAMES.fullmatch(rest):
                yield f"{roots[root]}.{rest}"
            elif node.attr not in ours:
                yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value) and node.value not in ours:
            yield f".{node.value}"
