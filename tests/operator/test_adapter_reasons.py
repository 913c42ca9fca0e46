# SPDX-License-Identifier: Apache-2.0
"""Every reason that a LoRAAdapter's conditions can have has a line in the troubleshooting page, under its condition."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_operator.plan import acceptance, adapter_conditions
from diffusion_operator.plan.adapter_codes import DEPLOYMENT_REASONS, SOURCE_REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
TYPES = ("Ready", "Accepted", "SourceResolved", "Loaded", "UpToDate", "Degraded")


def texts(node: ast.AST) -> Iterator[str]:
    """Text that an expression can be; not what it only looks at."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))


def reasons() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse(inspect.getsource(adapter_conditions))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "verdict":
            (type_,) = texts(node.args[0])
            found[type_] |= set(texts(node.args[2]))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "reason":
            found["Ready"] |= set(texts(node.value))
    for node in ast.walk(ast.parse(inspect.getsource(acceptance))):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            found["Accepted"] |= set(texts(node.value.elts[0]))
    found["Accepted"] |= {acceptance.Decision.__struct_defaults__[0], *DEPLOYMENT_REASONS}
    found["SourceResolved"] |= set(SOURCE_REASONS.values())
    return found


def explained() -> dict[str, set[str]]:
    """First cells of the tables, by the condition that the line before the table speaks of."""
    section = PAGE.read_text().partition("## LoRAAdapter")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = defaultdict(set)
    type_ = "Ready"
    for line in section.splitlines():
        if (opening := re.match(r"`(\w+)` ", line)) is not None:
            type_ = opening[1]
        elif line.startswith("| `"):
            found[type_] |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


@pytest.mark.parametrize("type_", TYPES)
def test_every_reason_is_explained_and_no_other(type_: str) -> None:
    assert explained()[type_] == reasons()[type_]


def test_the_reasons_are_found_at_all() -> None:
    found = reasons()
    assert set(found) == set(TYPES)
    assert {"Evicted", "PartiallyLoaded", "SourceError", "Failed", "LoadedEverywhere"} <= found["Ready"]
    assert {"NameConflict", "SecretNotMounted", "Accepted", "RankTooLarge"} <= found["Accepted"]
    assert sum(len(one) for one in found.values()) > 35
