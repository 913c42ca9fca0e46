# SPDX-License-Identifier: Apache-2.0
"""The reasons that the operator's conditions can have, read from the source of everything that calls `verdict`.

A reason's expression is followed through conditional expressions, assignments, loops over tables and tuples that functions return. An
expression that cannot be followed is an error with its place, unless the test gives its values. So no reason is missed.
"""

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

from diffusion_operator import plan
from diffusion_operator.plan.observed.replica_state import Problem
from support.syntax import parse

Found = dict[str, set[str]]

# The value of a group's problem.
PROBLEM = "<problem>"
ADAPTER_MODULE = "adapters.conditions"
OF_BOTH_KINDS = "not_understood"


class Reasons(NamedTuple):
    """Possible reasons of each condition type, for DiffusionDeployments and for LoRAAdapters."""

    deployment: Found
    adapter: Found


class _Source:
    """The syntax tree of a module, in which calls of `verdict` and the possible values of expressions are looked up."""

    def __init__(self, module: ModuleType, known: Mapping[str, Collection[str]]) -> None:
        self.module = module
        self._known = known
        self.tree = parse(inspect.getsource(module))
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def verdicts(self) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
        inside = [(function, node) for function in self.functions.values() for node in ast.walk(function)]
        return ((function, node) for function, node in inside if isinstance(node, ast.Call) and ast.unparse(node.func) == "verdict")

    def texts(self, node: ast.expr, function: ast.FunctionDef) -> set[str]:
        """Return the possible values of an expression; AssertionError with its place if it cannot be followed."""
        text = ast.unparse(node)
        if text in self._known:
            return set(self._known[text])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, function) | self.texts(node.orelse, function)
        if text.endswith("problem.value"):
            return {PROBLEM}
        if isinstance(node, ast.Subscript) and (table := self._table(node.value)) is not None:
            return table
        if isinstance(node, ast.Name) and (found := self._assigned(node.id, function)):
            return found
        raise AssertionError(f"{self.module.__name__}:{node.lineno}: cannot tell what {text} can be: teach condition_reasons.py to")

    def _table(self, node: ast.expr) -> set[str] | None:
        table = getattr(self.module, node.id, None) if isinstance(node, ast.Name) else None
        return {str(value) for value in table.values()} if isinstance(table, Mapping) else None

    def _assigned(self, name: str, function: ast.FunctionDef) -> set[str]:
        if isinstance(constant := getattr(self.module, name, None), str):
            return {str(constant)}
        found: set[str] = set()
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                    found |= self._taken(name, target, value, function)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    found |= self._taken(name, target, value, function)
                case ast.For(target=ast.Tuple(elts=[_, ast.Name(id=each)]), iter=ast.Call(func=ast.Attribute(value=table, attr="items"))):
                    found |= (self._table(table) if each == name else None) or set()
        return found

    def _taken(self, name: str, target: ast.expr, value: ast.expr, function: ast.FunctionDef) -> set[str]:
        """Return the possible values that an assignment gives to `name`; none if it assigns other names, or its form is not known."""
        names = [ast.unparse(one) for one in target.elts] if isinstance(target, ast.Tuple) else []
        match target, value:
            case ast.Name(id=taken), _ if taken == name:
                return self.texts(value, function)
            case ast.Tuple(), ast.Call(func=ast.Name(id=called)) if name in names and called in self.functions:
                inner = self.functions[called]
                returned = [node.value for node in ast.walk(inner) if isinstance(node, ast.Return)]
                parts = [one.elts[names.index(name)] for one in returned if isinstance(one, ast.Tuple)]
                return {text for part in parts for text in self.texts(part, inner)}
        return set()


def reasons_of(known: Mapping[str, Collection[str]]) -> Reasons:
    """Collect the reasons in all modules of the plan. `known` has the values of expressions that cannot be followed, by source text."""
    reasons = Reasons(defaultdict(set), defaultdict(set))
    for info in pkgutil.walk_packages(plan.__path__, "diffusion_operator.plan."):
        source = _Source(importlib.import_module(info.name), known)
        found = reasons.adapter if info.name.endswith(ADAPTER_MODULE) else reasons.deployment
        for function, call in source.verdicts():
            type_, _, reason, _ = call.args
            for each in source.texts(type_, function):
                for kind in reasons if function.name == OF_BOTH_KINDS else (found,):
                    kind[each] |= source.texts(reason, function)
    return reasons


def returned(module: ModuleType) -> set[str]:
    """Find `return` statements with a tuple in a module's source, and collect the constant strings at the head of those tuples."""
    tuples = [node.value for node in ast.walk(parse(inspect.getsource(module))) if isinstance(node, ast.Return)]
    firsts = [node.elts[0] for node in tuples if isinstance(node, ast.Tuple)]
    return {node.value for node in firsts if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def problems() -> set[str]:
    """Return the problems of a replica group that may be a condition's reason: those in the conditions' module, but for keys of tables."""
    tree = parse(inspect.getsource(importlib.import_module("diffusion_operator.plan.status.conditions")))
    keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Problem"]
    return {Problem[node.attr].value for node in named if id(node) not in keys}
