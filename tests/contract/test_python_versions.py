# SPDX-License-Identifier: Apache-2.0
"""Pythons that this machine may lack: their wheels resolve, and our sources hold nothing that they took away."""

import ast
import warnings
from pathlib import Path

import pytest

from support.syntax import SOURCES, parse
from tools.requirements import CONSTRAINTS, DISTRIBUTIONS, dependencies, resolve, versions

# Modules of the standard library that 3.12 and 3.13 removed (their pages of changes, and PEP 594).
REMOVED = {
    *("aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap"),
    *("msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}
# The manylinux tag of Debian 12, on which the container images stand.
PLATFORM = "x86_64-manylinux_2_36"


def sources() -> list[Path]:
    return [path for folder in SOURCES for path in sorted(folder.rglob("*.py"))]


def test_no_source_has_what_a_later_python_warns_of() -> None:
    """Compile all sources with warnings as errors. An unknown escape in a text is a `SyntaxWarning` in 3.12, and a `DeprecationWarning`
    in 3.11."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in sources():
            compile(path.read_text(), str(path), "exec")


def test_no_source_imports_a_module_that_a_later_python_removed() -> None:
    assert {module for path in sources() for module in imported(parse(path.read_text()))} & REMOVED == set()
    assert imported(parse("import imp\nfrom distutils.util import strtobool")) == {"imp", "distutils"}


def imported(tree: ast.Module) -> set[str]:
    """Return the first part of each module that is imported; relative imports are left out."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_each_library_at_its_pin_has_a_wheel_for_a_later_python() -> None:
    options = ["--python-version=3.13", f"--python-platform={PLATFORM}", f"--constraint={CONSTRAINTS}", "--only-binary=:all:"]
    found = versions(resolve(dependencies(*DISTRIBUTIONS), *options))
    assert {"torch", "diffusers", "kopf", "pyzmq", "msgspec"} <= found.keys() and len(found) > 80
