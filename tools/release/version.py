# SPDX-License-Identifier: Apache-2.0
"""The version of a release: that of its tag, if what is in the container images says the same."""

from __future__ import annotations

import tomllib

from tools.devcluster.errors import DevclusterError
from tools.devcluster.paths import REPOSITORY

PACKAGES = ("operator", "worker")


def package_version(package: str) -> str:
    """Return the version in a package's pyproject.toml, which its container image gets."""
    version: str = tomllib.loads((REPOSITORY / package / "pyproject.toml").read_text())["project"]["version"]
    return version


def released_version(tag: str) -> str:
    """Check that a release's tag is `v` followed by the version X.Y.Z of both packages, and return that version.

    Raises:
        DevclusterError: a package has another version.
    """
    for package in PACKAGES:
        if tag != f"v{package_version(package)}":
            raise DevclusterError(f"the tag is {tag}, expected v{package_version(package)}, the version in {package}/pyproject.toml")
    return tag.removeprefix("v")
