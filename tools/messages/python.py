# SPDX-License-Identifier: Apache-2.0
"""Messages in Python: errors, conditions, Events, log lines, help of metrics, and the texts they consist of.

A value in a message is shown by its name in braces, or by the text above that it stands for. A choice, as of `a if b else c` and `a or c`,
is shown as `{a|c}`, and no text in it as nothing. The length of a list or a text is `{number of names}`, and the name of a class is
`{type of error}`.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from tools.messages.expressions import (
    HOLE,
    Texts,
    children,
    choices,
    code_of,
    constants_of,
    entries_of,
    is_log_call,
    is_prose,
    last_name,
    texts_by_name,
    texts_within,
    walk,
)
from tools.messages.message import Kind, Message
from tools.messages.unread import unread
from tools.words_sources import is_text

QUIET = {"debug", "info"}
METRICS = re.compile(r"(gauge|counter|histogram)(s|MetricFamily)?", re.IGNORECASE)
METRIC_TYPE = re.compile(r"gauge|counter|histogram")
FORMAT = re.compile(r"%[-+ 0#]*[\d.]*[a-z]")
VERDICTS = {"verdict", "_normal", "_warning", "PlannedEvent"}
"""Functions that make a condition or an Event; their message is shown by its name where it is no text."""


@dataclass(frozen=True)
class Maker:
    """A function that does nothing but make and return an error: its parameters, the texts in it, and the error."""

    parameters: Sequence[str]
    texts: Texts
    error: ast.Call


class Package:
    """All modules below a folder: their trees, the classes of errors, and the functions that make errors."""

    def __init__(self, folder: Path, default: Kind) -> None:
        self.default = default
        """The kind of a text in a file that shows no other."""
        self.trees = {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}

    def messages(self) -> dict[str, list[Message]]:
        """Return the messages of each module that has some, by the module's path, in the order of the source."""
        found = {path: _Module(tree, self).messages() for path, tree in self.trees.items()}
        return {path: messages for path, messages in found.items() if messages}

    @cached_property
    def errors(self) -> set[str]:
        """The names of all exception classes: those of builtins, and those of the package that derive from one."""
        found = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
        classes = [node for tree in self.trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
        while more := {one.name for one in classes if found & {last_name(base) for base in one.bases}} - found:
            found |= more
        return found

    @cached_property
    def codes(self) -> dict[str, str]:
        """The names of constants at the top of modules whose value is a code or a reason, with that value."""
        assigned = [node for tree in self.trees.values() for node in tree.body if isinstance(node, ast.Assign)]
        return {last_name(node.targets[0]): code for node in assigned if (code := code_of(node.value, {})) is not None}

    @cached_property
    def constants(self) -> dict[str, dict[str, list[ast.expr]]]:
        """The constants of each module that are texts or numbers, by the module's path."""
        return {path: constants_of(tree) for path, tree in self.trees.items()}

    def names(self, tree: ast.Module) -> Texts:
        """Return the constants that a module can use and that are texts or numbers: its own, and those of modules from which it imports."""
        found: dict[str, list[ast.expr]] = {}
        for node in (node for node in walk(tree) if isinstance(node, ast.ImportFrom)):
            there = self.constants.get(f"{(node.module or '').partition('.')[2].replace('.', '/')}.py", {})
            found = there | found | {one.name: there[one.name] for one in node.names if one.name in there}
        return found | constants_of(tree)

    @cached_property
    def families(self) -> dict[str, str]:
        """The functions at the top of modules that make a family of metrics: its name, with a parameter in braces, and its type."""
        found = {}
        for tree in self.trees.values():
            for function in self.functions(tree):
                for node in walk(function):
                    if isinstance(node, ast.Call) and last_name(node.func).endswith("MetricFamily"):
                        found[function.name] = _Module(tree, self).metric_name(node)
        return found

    @cached_property
    def makers(self) -> dict[str, Maker]:
        """The functions at the top of modules that do nothing but make and return an error, by name."""
        functions = chain.from_iterable(self.functions(tree) for tree in self.trees.values())
        return {function.name: maker for function in functions if (maker := self.maker(function)) is not None}

    @staticmethod
    def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
        """Yield the functions at the top of a module; methods, nested functions and coroutines are left out."""
        return (node for node in tree.body if isinstance(node, ast.FunctionDef))

    def maker(self, function: ast.FunctionDef) -> Maker | None:
        """Return the error that a function makes and the names of its parameters; None for a function that does something else."""
        match [node for node in function.body if not isinstance(node, ast.Expr)]:
            case [*before, ast.Return(value=ast.Call() as error)] if last_name(error.func) in self.errors:
                if all(isinstance(node, ast.Assign) for node in before):
                    return Maker([one.arg for one in function.args.args], texts_by_name(before), error)
        return None


class _Module:
    """Reads the messages of one module of a package."""

    def __init__(self, tree: ast.Module, package: Package) -> None:
        self._tree = tree
        self._package = package
        self._read: set[int] = set()
        self._makers = package.makers | {one.name: maker for one in package.functions(tree) if (maker := package.maker(one))}
        self._functions = {node.name for node in walk(tree) if isinstance(node, ast.FunctionDef)}
        self._names = package.names(tree)
        self._unread = unread(tree)
        self._entries = entries_of(tree)

    def messages(self) -> list[Message]:
        """Return all messages of the module by their lines: those of calls that make one, and its other texts.

        The other texts get the commonest kind of the module's messages, log lines left out.
        """
        made = list(self._made(self._tree, self._names))
        kinds = Counter(one.kind for one in made if one.kind is not Kind.LOG)
        kind = kinds.most_common(1)[0][0] if kinds else self._package.default
        others = [Message(kind, line, "", text) for line, text in self._others(self._tree, self._names, "")]
        return sorted(dict.fromkeys([*made, *others]), key=lambda one: one.line)

    def _made(self, node: ast.AST, names: Texts, field: str = "", *, raised: bool = False) -> Iterator[Message]:
        """Yield the messages of the calls at or below a node, such as those that make an error, a log line or a metric."""
        match node:
            case ast.Assert() | ast.arg():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names = texts_within(node, names)
            case ast.AnnAssign(target=ast.Name(id=name)):
                field = name
            case ast.Call() if (message := self._message(node, names, field, raised=raised)) is not None:
                yield message
        raised = isinstance(node, ast.Raise)
        for child in children(node):
            yield from self._made(child, names, field, raised=raised)

    def _message(self, call: ast.Call, names: Texts, field: str, *, raised: bool) -> Message | None:
        called = last_name(call.func)
        if is_log_call(call):
            text = self._log_text(call.args[called == "log" and len(call.args) > 1 :], names)
            level = self._levels(call.args[0]) if called == "log" else {"exception": "ERROR, with a traceback"}.get(called, called.upper())
            return None if called in QUIET else Message(Kind.LOG, call.lineno, level, text)
        if (METRICS.fullmatch(called) or called in self._package.families) and len(call.args) > 1:
            text = self._text(call.args[1], names)
            return None if HOLE.fullmatch(text) else Message(Kind.METRIC, call.lineno, self.metric_name(call), text)
        for keyword in call.keywords:
            if keyword.arg == "description" and self._package.default is Kind.ERROR:
                return Message(Kind.API, call.lineno, field, self._text(keyword.value, names))
        if raised and called in self._makers:
            return self._made_error(call, self._makers[called], names)
        condition = called in VERDICTS and isinstance(call.func, ast.Name)
        if raised or called in self._package.errors or condition:
            return self._coded(call, names, Kind.CONDITION if condition else Kind.ERROR)
        return None

    def metric_name(self, call: ast.Call) -> str:
        """Return the name that Prometheus shows for a metric that a call makes, followed by the metric's type in parentheses."""
        given, called = call.args[0], last_name(call.func)
        parts = [given.left, given.right] if isinstance(given, ast.BinOp) else [given]
        name = "".join(self._text(part, self._names) for part in parts)
        if not called.endswith("MetricFamily") and called in self._package.families:
            return self._package.families[called].replace("{name}", name)
        (form,) = METRIC_TYPE.findall(called.lower())
        return f"{name}{'_total' * (form == 'counter')} ({form})"

    def _made_error(self, call: ast.Call, maker: Maker, names: Texts) -> Message | None:
        """Return the message of a call of a function that makes an error, with this call's arguments in the text."""
        given = dict(zip(maker.parameters, call.args, strict=False)) | {one.arg: one.value for one in call.keywords if one.arg}
        arguments = {name: [ast.Constant(self._text(value, names))] for name, value in given.items()}
        message = self._coded(maker.error, {**maker.texts, **arguments}, Kind.ERROR)
        return message and replace(message, line=call.lineno)

    def _coded(self, call: ast.Call, names: Texts, kind: Kind) -> Message | None:
        """Return the message of a call whose arguments are codes or reasons, and a text.

        None if it has no code and its text is a mere value.
        """
        arguments = [*call.args, *(one.value for one in call.keywords if one.arg in ("reason", "message"))]
        codes = [code for argument in arguments if (code := self._code(argument)) is not None]
        texts = [one for one in arguments if self._code(one) is None and self._is_known(one, names)]
        unknown = [one for one in arguments if self._code(one) is None and not isinstance(one, ast.Constant)]
        called = last_name(call.func)
        text = ", ".join(self._text(one, names) for one in texts or unknown[-1:])
        if not codes and (HOLE.fullmatch(text) or (kind is Kind.ERROR and called.strip("_")[0].islower())):
            return None  # a mere value, or an argument of a function that makes an error and does more
        return Message(kind, call.lineno, " ".join(codes) or (called if kind is Kind.ERROR else ""), text)

    def _others(self, node: ast.AST, names: Texts, owner: str) -> Iterator[tuple[int, str]]:
        """Yield the line and text of each prose string that no message contains yet.

        Before the text stands the name of the function or variable that holds it.
        """
        match node:
            case ast.Assert() | ast.arg():
                return
            case _ if id(node) in self._unread:
                return
            case ast.Call() if is_log_call(node):
                return
            case ast.Expr(value=value) if is_text(value):
                return  # a docstring
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                owner, names = f"{{{name.strip('_')}}} =", texts_within(node, names)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple(elts=elements)) if all(map(is_text, elements)) and name.isupper():
                return  # parts of other programs' messages, which are looked for
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                owner = f"{{{name.strip('_')}}} ="
            case ast.Call(args=elements) | ast.Tuple(elts=elements) if codes := list(filter(None, map(self._code, elements))):
                owner = f"{owner} {codes[0]}:"
        if is_text(node):
            assert isinstance(node, ast.expr)
            if id(node) not in self._read and is_prose(text := self._text(node, names)):
                yield node.lineno, f"{owner} {text}"
            inner: list[ast.AST] = [part.value for part in walk(node) if isinstance(part, ast.FormattedValue)]
        elif any(is_text(one) and is_prose(self._text(one, names)) for one in choices(node)):
            assert isinstance(node, ast.expr)
            if id(node) not in self._read:
                yield node.lineno, f"{owner} {self._text(node, names)}"
            inner = [one for one in children(node) if not is_text(one)]
        else:
            apart = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", ())]
            inner = [child for child in children(node) if child not in apart]
        for child in inner:
            yield from self._others(child, names, owner)

    # Texts

    def _code(self, node: ast.AST) -> str | None:
        return code_of(node, self._package.codes)

    def _is_known(self, node: ast.expr, names: Texts) -> bool:
        if isinstance(node, ast.Name) and node.id in names:
            return not all(isinstance(one, ast.Constant) and not is_text(one) for one in names[node.id])
        return is_text(node) or isinstance(node, ast.IfExp)

    def _text(self, node: ast.expr, names: Texts) -> str:
        """Return the text that an expression shows to a user, with values as names in braces, and mark the expression as read."""
        self._read.add(id(node))
        match node:
            case ast.Constant(value=value):
                return "" if value is None else str(value)
            case ast.JoinedStr(values=parts):
                return "".join(self._text(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in parts)
            case ast.BinOp(op=ast.Add(), left=left, right=right) if is_text(node):
                return self._text(left, names) + self._text(right, names)
            case ast.IfExp() | ast.BoolOp() if found := choices(node):
                return f"{{{'|'.join(self._text(one, names) for one in found)}}}"
            case ast.Attribute(value=ast.Name(id="ErrorCode")):
                return self._code(node) or ""
            case ast.Subscript(value=ast.Name(id=table), slice=ast.Constant(value=key)) if (table, key) in self._entries:
                return self._text(self._entries[table, key], names)
            case ast.Name(id=name) if name in names:
                above = [one for one in names[name] if getattr(one, "lineno", 0) <= node.lineno]
                return self._text((above or names[name])[-1], {other: texts for other, texts in names.items() if other != name})
        return f"{{{self._name(node)}}}"

    def _levels(self, level: ast.expr) -> str:
        """Name the levels that an expression chooses between, as `WARNING or ERROR`: itself, or what its name is assigned."""
        assigned = (node for node in walk(self._tree) if isinstance(node, ast.Assign) and isinstance(level, ast.Name))
        values = [node.value for node in assigned if last_name(node.targets[0]) == last_name(level)]
        names = [node.attr for value in (*values, level) for node in walk(value) if isinstance(node, ast.Attribute) and node.attr.isupper()]
        return " or ".join(dict.fromkeys(names))

    def _log_text(self, arguments: Sequence[ast.expr], names: Texts) -> str:
        """Return the text of a log line, the first argument, with the names of the others in place of its `%s` and their like."""
        text = self._text(arguments[0], names)
        values = [f"{{{self._name(value)}}}" for value in arguments[1:]]
        return FORMAT.sub(lambda _: values.pop(0), text) if len(FORMAT.findall(text)) == len(values) else text

    def _name(self, node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return name.strip("_")
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return name.strip("_")
            case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[argument]), attr="__name__"):
                return f"type of {self._name(argument)}"
            case ast.Attribute(value=value, attr=name):
                return f"{self._name(value)}.{name.strip('_')}"
            case ast.Call(func=ast.Attribute(attr="join"), args=[argument]):
                return self._name(argument)
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if hasattr(str, method) and method not in ("count", "index"):
                return self._name(value)
            case ast.Call(func=ast.Name(id="len"), args=[argument]):
                return f"number of {self._name(argument)}"
            case ast.Call(func=ast.Name(id=called), args=[argument, *_]) if called not in self._functions:
                return self._name(argument)
            case ast.Call(func=called):
                return self._name(called)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self._name(value)
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                return self._name(element)
            case ast.JoinedStr():
                return self._text(node, {})
            case ast.IfExp(body=body):
                return self._name(body)
            case ast.BoolOp(values=[first, *_]) | ast.BinOp(left=first):
                return self._name(first)
        return ast.unparse(node) if isinstance(node, ast.Constant) else "…"
