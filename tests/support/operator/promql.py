# SPDX-License-Identifier: Apache-2.0
"""A small parser of PromQL, for rules: whether an expression is one, and which metrics it looks at with which labels.

Real: the grammar. Not real: Prometheus. Only the operators and functions of the chart's rules are known; anything else is an error.
So it refuses more than Prometheus does, never less.
"""

import re
from typing import NamedTuple

STRING = r'"(?:[^"\\]|\\.)*"'
MATCHER = rf"\s*([a-zA-Z_:][\w:]*)\s*(=~|!~|!=|=)\s*({STRING})\s*"
TOKEN = re.compile(
    rf"""\s*(?:
      (?P<aggregation>sum|min|max|avg|count)\b\s*(?:(?:by|without)\b\s*\((?P<labels>(?:\s*[\w:]+\s*(?:,|(?=\))))*)\))?\s*\(
    | (?P<call>rate|increase|avg_over_time|max_over_time|absent|time|histogram_quantile)\s*\(
    | (?P<word>or|and|unless)\b
    | (?P<metric>[a-zA-Z_:][\w:]*)\s*(?:\{{(?P<matchers>(?:{MATCHER}(?:,|(?=\}})))*)\s*\}})?\s*(?P<range>\[\s*\d+[smhdwy]\s*\])?
    | (?P<number>\d+(?:\.\d+)?)(?![\w.])
    | (?P<operator>==|!=|>=|<=|[-+*/%(),<>])
    )""",
    re.VERBOSE,
)
# The kind of a call by its name and its arguments: a vector, a scalar or a range. Parentheses alone are a call without a name.
CALLS = {f"{name}(range)": "vector" for name in ("rate", "increase", "avg_over_time", "max_over_time")}
CALLS |= {"time()": "scalar", "histogram_quantile(scalar, vector)": "vector", "absent(vector)": "vector", "aggregation(vector)": "vector"}
CALLS |= {f"({kind})": kind for kind in ("vector", "scalar", "range")}
# From the tightest to the loosest; the last two join vectors only.
LEVELS = (r"[*/%]", r"[-+]", r"==|!=|>=|<=|>|<", r"and|unless", r"or")
INNERMOST = re.compile(r"(\w*)\(([^()]*)\)")


class Selector(NamedTuple):
    """A metric with its matchers: label, operator, value."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


class PromQL:
    """One expression, parsed; `selectors` and `grouped` (labels of by clauses) are what it looks at. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self.selectors: list[Selector] = []
        self.grouped: set[str] = set()
        kinds, at = "", 0
        while at < len(text.rstrip()):
            if (found := TOKEN.match(text, at)) is None:
                raise ValueError(f"{text!r}: no token at {text[at : at + 20]!r}")
            kinds, at = f"{kinds} {self._read(found)}", found.end()
        while (inner := INNERMOST.search(kinds)) is not None:
            given = f"{inner[1]}({', '.join(map(_joined, inner[2].split(',')))})"
            if given not in CALLS:
                raise ValueError(f"{text!r}: expected one of {list(CALLS)}, found {given!r}")
            kinds = f"{kinds[: inner.start()]} {CALLS[given]} {kinds[inner.end() :]}"
        if _joined(kinds) != "vector":
            raise ValueError(f"{text!r}: expected a vector, found {_joined(kinds)!r}")

    def _read(self, token: re.Match[str]) -> str:
        """Return the kind of a token, and note what it looks at."""
        if token["metric"]:
            matchers = [(label, operator, value[1:-1]) for label, operator, value in re.findall(MATCHER, token["matchers"] or "")]
            for _, _, value in matchers:
                re.compile(value)
            self.selectors.append(Selector(token["metric"], tuple(matchers)))
            return "range" if token["range"] else "vector"
        if token["aggregation"]:
            self.grouped |= set(re.findall(r"[\w:]+", token["labels"] or ""))
            return "aggregation("
        return f"{token['call']}(" if token["call"] else "scalar" if token["number"] else token["word"] or token["operator"]


def _joined(kinds: str) -> str:
    """Reduce operators between kinds without parentheses, the tightest first; what is left is one kind, or an error."""
    for number, level in enumerate(LEVELS):
        sides = "vector" if number > 2 else "vector|scalar"
        operation = re.compile(rf"\b({sides})\s+(?:{level})\s+({sides})\b")
        while (found := operation.search(kinds)) is not None:
            kinds = f"{kinds[: found.start()]}{'scalar' if found[1] == found[2] == 'scalar' else 'vector'}{kinds[found.end() :]}"
    return " ".join(kinds.split())
