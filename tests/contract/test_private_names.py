# SPDX-License-Identifier: Apache-2.0
"""The private names of libraries: each is listed with its reason, exists in the installed library, and limits the releases that are
allowed."""

import importlib.metadata
import importlib.util
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.syntax import used_names
from tools.requirements import DISTRIBUTIONS, dependencies

LISTED: dict[str, dict[str, dict[str, Any]]] = tomllib.loads((Path(__file__).parent / "private_names.toml").read_text())
# These have no releases of their own.
BUILT_IN = {"python", "ours"}


def test_every_private_name_that_the_sources_use_is_listed_with_its_files_and_nothing_else_is() -> None:
    listed = {name: set(entry["files"]) for names in LISTED.values() for name, entry in names.items()}
    used = used_names()
    assert {name: files ^ listed.get(name, set()) for name, files in used.items() if files != listed.get(name)} == {}
    assert listed.keys() - used.keys() == set()


def test_every_private_name_has_a_reason() -> None:
    assert [name for names in LISTED.values() for name, entry in names.items() if not entry["reason"].strip()] == []


@pytest.mark.parametrize(("name", "entry"), [item for library, names in LISTED.items() if library != "ours" for item in names.items()])
def test_a_private_name_exists_in_the_installed_version(name: str, entry: dict[str, Any]) -> None:
    if name.startswith("."):
        found = importlib.util.find_spec(entry["in"])
        assert found is not None and found.origin is not None
        assert re.search(rf"\b{name[1:]}\b", Path(found.origin).read_text()), f"{entry['in']} has no {name[1:]}"
    else:
        assert _exists(name), name


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def requirements() -> list[Requirement]:
    """Return the requirements of both distributions."""
    return [Requirement(line) for line in dependencies(*DISTRIBUTIONS)]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_bounded_by_the_rule_and_what_is_installed_is_within(requirement: Requirement) -> None:
    [bound] = [Version(item.version) for item in requirement.specifier if item.operator == "<"]
    installed = Version(importlib.metadata.version(requirement.name))
    assert requirement.specifier.contains(installed), f"{requirement}, installed is {installed}"
    by_minor = requirement.name in PRIVATE_TO or installed.major == 0
    assert bound.release == ((installed.major, installed.minor + 1) if by_minor else (installed.major + 1,)), f"{requirement}: {installed}"


PRIVATE_TO = LISTED.keys() - BUILT_IN
