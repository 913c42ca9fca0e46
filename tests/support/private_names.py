# SPDX-License-Identifier: Apache-2.0
"""Finds the private names of libraries in our sources: imports, attributes and strings whose last part begins with one underscore.

An attribute of an object counts as a library's where nothing in our own sources is called so. A library's name
that our sources use for something else is missed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.syntax import parse

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "worker" / "src", ROOT / "operator" / "src")
OURS = ("diffusion_worker", "diffusion_operator")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def used_names() -> dict[str, set[str]]:
    """List by name the files that use it: `torch._C._nn._parse_to` where the library is known, else `._blocks`."""
    trees = {path: parse(path.read_text()) for folder in SOURCES for path in sorted(folder.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _used(tree, ours):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def _used(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                roots[item.asname or item.name.partition(".")[0]] = item.name if item.asname else item.name.partition(".")[0]
                if _is_private(item.name):
                    yield item.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(OURS):
            for item in node.names:
                roots[item.asname or item.name] = full = f"{node.module}.{item.name}"
                if _is_private(full):
                    yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            chain = _chain(node)
            if chain and chain[0] in roots:
                yield ".".join((roots[chain[0]], *chain[1:]))
            elif node.attr not in ours:
                yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value) and node.value not in ours:
            yield f".{node.value}"


def _is_private(path: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in path.split("."))


def _chain(node: ast.Attribute) -> list[str]:
    parts: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return [*parts, inner.id][::-1] if isinstance(inner, ast.Name) else []
