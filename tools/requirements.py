# SPDX-License-Identifier: Apache-2.0
"""Dependencies of our distributions, pins, and releases that go together. Needs nothing but Python, and `resolve` uv beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
DISTRIBUTIONS = ("worker", "operator")
RESOLVE_TIMEOUT_S = 180


def dependencies(*distributions: str) -> list[str]:
    """Return the requirements that the pyproject.toml of these distributions list, with their bounds; extras are left out."""
    projects = (tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in distributions)
    return [requirement for project in projects for requirement in project["dependencies"]]


def versions(lines: str) -> dict[str, str]:
    """Return the version of each distribution in lines of `name==version`, by its normalized name; other lines are ignored."""
    pairs = (line.partition("==") for line in lines.splitlines() if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version.strip() for name, _, version in pairs}


def uv(*words: str) -> list[str]:
    """Return the words of a call of the uv that is beside this Python."""
    return [str(Path(sys.executable).with_name("uv")), *words]


def uv_environment() -> dict[str, str]:
    """Return this process's environment with PIP_INDEX_URL as uv's index too, because uv does not read pip's settings."""
    return {**os.environ, **({"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {})}


def resolve(asked: Iterable[str], *options: str) -> str:
    """Return the newest releases that meet the requirements and go together, a line of `name==version` each.

    Raises:
        RuntimeError: they do not go together, or no index answers; with uv's own words.
    """
    command = uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", *options, "-")
    given = "\n".join(asked)
    ran = subprocess.run(command, input=given, env=uv_environment(), capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False)
    if ran.returncode:
        raise RuntimeError(f"expected releases that go together, found: {ran.stderr.strip()}")
    return ran.stdout
