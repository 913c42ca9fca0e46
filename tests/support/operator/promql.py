# SPDX-License-Identifier: Apache-2.0
"""A small parser of PromQL, for rules: whether an expression is one, and which metrics it looks at with which labels.

It knows the operators and functions that the chart's rules use, and of each function whether it takes a range; anything else is an
error. So it refuses more than Prometheus does, never less.
"""

import re
from typing import NamedTuple

TOKEN = re.compile(
    r"""\s*(?:(?P<duration>\d+[smhdwy])|(?P<number>\d+(?:\.\d+)?)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<name>[a-zA-Z_:][\w:]*)"""
    r"""|(?P<op>==|!=|>=|<=|=~|!~|[-+*/%(){}\[\],=<>]))"""
)
AGGREGATIONS = {"sum", "min", "max", "avg", "count"}
# By name, what the arguments are.
FUNCTIONS = {
    "rate": ["range"],
    "increase": ["range"],
    "avg_over_time": ["range"],
    "max_over_time": ["range"],
    "absent": ["vector"],
    "time": [],
    "histogram_quantile": ["scalar", "vector"],
}
LEVELS = (("or",), ("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/", "%"))
MATCHERS = ("=", "!=", "=~", "!~")


class Selector(NamedTuple):
    """A metric with its matchers: label, operator, value."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


class PromQL:
    """One expression, parsed; `selectors` and `grouped` (labels of by clauses) are what it looks at. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.selectors: list[Selector] = []
        self.grouped: set[str] = set()
        self._tokens = self._read()
        self._at = 0
        kind = self._level(0)
        if self._at < len(self._tokens) or kind != "vector":
            raise self._error("the end of a vector")

    def _read(self) -> list[tuple[str, str]]:
        tokens, at, text = [], 0, self.text.rstrip()
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise ValueError(f"{self.text!r}: no token at {text[at : at + 20]!r}")
            tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        return tokens

    def _error(self, expected: str) -> ValueError:
        return ValueError(f"{self.text!r}: expected {expected} at {[value for _, value in self._tokens[self._at :]][:5]}")

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, kind: str | None = None, value: str | None = None) -> str:
        found = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if (kind is not None and found[0] != kind) or (value is not None and found[1] != value):
            raise self._error(value or str(kind))
        self._at += 1
        return found[1]

    def _level(self, level: int) -> str:
        """Operators from the loosest to the tightest; what a part is: scalar, vector or range."""
        if level == len(LEVELS):
            return self._part()
        left = self._level(level + 1)
        while self._peek() in LEVELS[level]:
            self._take()
            right = self._level(level + 1)
            if "range" in (left, right) or (level < 2 and "scalar" in (left, right)):
                raise self._error("vectors on both sides")
            left = "vector" if "vector" in (left, right) else "scalar"
        return left

    def _part(self) -> str:
        kind, value = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind == "number":
            self._take()
            return "scalar"
        if value == "(":
            self._take()
            inside = self._level(0)
            self._take(value=")")
            return inside
        name = self._take("name")
        if name in AGGREGATIONS:
            return self._aggregation()
        if name in FUNCTIONS and self._peek() == "(":
            return self._call(name)
        return self._selector(name)

    def _aggregation(self) -> str:
        if self._peek() in ("by", "without"):
            self._take()
            self._take(value="(")
            while self._peek() != ")":
                self.grouped.add(self._take("name"))
                if self._peek() == ",":
                    self._take()
            self._take(value=")")
        self._take(value="(")
        if self._level(0) != "vector":
            raise self._error("a vector in the aggregation before")
        self._take(value=")")
        return "vector"

    def _call(self, name: str) -> str:
        self._take(value="(")
        for number, wanted in enumerate(FUNCTIONS[name]):
            if number:
                self._take(value=",")
            if (found := self._level(0)) != wanted:
                raise self._error(f"a {wanted} in {name}, found a {found},")
        self._take(value=")")
        return "vector" if FUNCTIONS[name] else "scalar"

    def _selector(self, name: str) -> str:
        matchers = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                label, operator, value = self._take("name"), self._take("op"), self._take("string")[1:-1]
                if operator not in MATCHERS:
                    raise self._error(f"one of {MATCHERS} before")
                re.compile(value)
                matchers.append((label, operator, value))
                if self._peek() != "}":
                    self._take(value=",")
            self._take(value="}")
        self.selectors.append(Selector(name, tuple(matchers)))
        if self._peek() != "[":
            return "vector"
        self._take()
        self._take("duration")
        self._take(value="]")
        return "range"
