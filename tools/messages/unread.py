# SPDX-License-Identifier: Apache-2.0
"""Strings of Python that no user reads: those that are looked for, arguments of other libraries, prompts of the program's own, headers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.messages.expressions import last_name, walk

# Annotations, patterns, names of tasks, and bytes.
NO_MESSAGES = {"cast", "compile", "filterwarnings", "findall", "match", "search", "sub", "create_task", "basicConfig", "encode", "option"}
LOOKS_FOR = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "replace",
    "find",
    "index",
    "count",
}
HEADER = re.compile(r"[A-Z][a-z]+(?:-[A-Z][a-z]+)+")


def unread(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes of a module that hold no text for a user.

    An assigned constant is among them if the module uses it, and only where nobody reads it.
    """
    found = {id(node) for part in _parts(tree) for node in walk(part)}
    used: dict[str, list[bool]] = {}
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.setdefault(node.id, []).append(id(node) in found)
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if all(used.get(name, [False])):
                found.update(map(id, walk(value)))
    return found


def _parts(tree: ast.Module) -> Iterator[ast.AST]:
    for node in walk(tree):
        match node:
            case ast.Compare() | ast.keyword(arg="prompt"):
                yield node
            case ast.Call() if last_name(node.func) in NO_MESSAGES:
                yield node
            case ast.Call() if last_name(node.func) in LOOKS_FOR:
                yield from node.args
            case ast.Dict(keys=keys, values=values):
                named = zip(keys, values, strict=True)
                yield from (value for key, value in named if isinstance(key, ast.Constant) and HEADER.fullmatch(str(key.value)))
