# SPDX-License-Identifier: Apache-2.0
"""The version of a release: the tag, both packages, the chart in the tree and the changelog's newest part have the same one."""

import re
import subprocess
import sys

import pytest
import yaml

from tools.devcluster.errors import DevclusterError
from tools.devcluster.paths import REPOSITORY
from tools.release.chart import CHART
from tools.release.version import PACKAGES, package_version, released_version

VERSION = package_version("operator")


def test_the_version_is_written_the_same_wherever_it_is_written() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    newest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert {about["version"], about["appVersion"], newest[1], *map(package_version, PACKAGES)} == {VERSION}


def test_a_tag_is_v_and_the_version() -> None:
    assert released_version(f"v{VERSION}") == VERSION


@pytest.mark.parametrize("tag", ["v99.0.0", VERSION, f"v{VERSION}-rc1", "main", ""])
def test_another_tag_is_refused_with_the_version_it_should_be(tag: str) -> None:
    with pytest.raises(DevclusterError, match=rf"the tag is {tag}, expected v{VERSION}, the version in operator/pyproject.toml"):
        released_version(tag)


def test_the_command_needs_nothing_but_the_standard_library_and_says_what_is_wrong() -> None:
    words = [sys.executable, "-S", "-m", "tools.release", "image", "operator", "registry.example", "v99.0.0"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the tag is v99.0.0, expected v{VERSION}, the version in operator/pyproject.toml\n"
