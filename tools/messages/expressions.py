# SPDX-License-Identifier: Apache-2.0
"""Expressions of Python that make texts: the names that stand for texts, codes and reasons, and what counts as prose."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

from tools.words_sources import LEVELS, is_text

LOGGERS = {"log", "logger"}
CODE = re.compile(r"[A-Z][A-Za-z]+")
WORD = re.compile(r"[\"'(“]*[A-Za-z][A-Za-z'’-]*[.,:;)\"'”?]*")
FEWEST_WORDS = 2
# A list of names, such as the parameters of a function, or directives with their values.
LIST = re.compile(r"[\w.-]+(?:=\S+)?(?:, [\w.-]+(?:=\S+)?)+")
HOLE = re.compile(r"\{[^{}]*\}")

Texts = Mapping[str, Sequence[ast.expr]]
"""Names that stand for texts only, and the texts."""


def texts_within(function: ast.FunctionDef | ast.AsyncFunctionDef, names: Texts) -> Texts:
    """Return the names that stand for texts within a function: those of `names` that are no parameters of it, and its own."""
    parameters = {node.arg for node in walk(function.args) if isinstance(node, ast.arg)}
    return {name: texts for name, texts in names.items() if name not in parameters} | texts_by_name(function.body)


def texts_by_name(body: Sequence[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Return the names to which these statements, or those within them, assign texts and nothing else, with all the texts."""
    texts: dict[str, list[ast.expr]] = {}
    assigned: Counter[str] = Counter()
    for node in chain.from_iterable(map(walk, body)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_text(value) or choices(value):
                texts.setdefault(name, []).append(value)
            case ast.Name(id=name, ctx=ast.Store()):
                assigned[name] += 1
    return {name: found for name, found in texts.items() if len(found) == assigned[name]}


def constants_of(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Return the constants at the top of a module that are texts or numbers."""
    body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return texts_by_name(body) | _numbers(body)


def _numbers(body: Sequence[ast.stmt]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float()) as value):
                found[name] = [value]
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = zip(names, values, strict=True)
                found |= {last_name(one): [value] for one, value in pairs if isinstance(value, ast.Constant) and not is_text(value)}
    return found


def entries_of(tree: ast.Module) -> dict[tuple[str, object], ast.expr]:
    """Return the texts in dictionaries at the top of a module, by the dictionary's name and the key."""
    found: dict[tuple[str, object], ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys, values=values)):
                pairs = zip(keys, values, strict=True)
                found |= {(name, key.value): value for key, value in pairs if isinstance(key, ast.Constant) and is_text(value)}
    return found


def choices(node: ast.AST) -> Sequence[ast.expr]:
    """Return the expressions between which one chooses, if one of them is a text; an empty list for any other expression.

    A choice is `a if b else c`, or `a or b`.
    """
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            found = [body, orelse]
        case ast.BoolOp(op=ast.Or(), values=values):
            found = values
        case _:
            return []
    return found if any(map(is_text, found)) else []


def code_of(node: ast.AST, constants: Mapping[str, str]) -> str | None:
    """Return the code or reason that an expression is: a literal, a constant, a member of an enumeration, or a choice with one of these.

    None for any other expression. A part that is a value is shown as `…`.
    """
    match node:
        case ast.Constant(value=str(text)) if CODE.fullmatch(text):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), ast.FormattedValue()]) if CODE.fullmatch(text):
            return f"{text}…"
        case ast.Attribute(value=ast.Name(id="ErrorCode" | "Problem"), attr=name):
            return name.title().replace("_", "")
        case ast.Name(id=name):
            return constants.get(name)
        case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
            found = [code_of(one, constants) for one in (first, second)]
            return "|".join(code or "…" for code in found) if any(found) else None
    return None


@cache
def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, in its order, without those that have no fields, such as operators."""
    return [child for child in ast.iter_child_nodes(node) if child._fields]


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, in the order of the source."""
    left = [node]
    while left:
        yield (node := left.pop())
        left += reversed(children(node))


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for an expression of another form."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_log_call(call: ast.Call) -> bool:
    """Return whether a call writes a log line of any level."""
    return isinstance(call.func, ast.Attribute) and last_name(call.func.value) in LOGGERS and call.func.attr in {*LEVELS, "log"}


def is_prose(text: str) -> bool:
    """Return whether a text is one line of at least two words beside its values, and no mere list of names."""
    if LIST.fullmatch(text):
        return False
    plain = HOLE.sub("{}", text)
    return "\n" not in plain and "\\" not in plain and sum(map(bool, map(WORD.fullmatch, plain.split()))) >= FEWEST_WORDS
