# SPDX-License-Identifier: Apache-2.0
"""The version before, which tests of upgrades take from the history: a full clone has it, and a shallow one fails with its name."""

import subprocess
from pathlib import Path

import pytest
import yaml

from support.release.earlier import ROOT, EarlierVersion
from tools.release.upgrades import UPGRADES_FROM
from tools.release.version import package_version


@pytest.mark.parametrize("version", UPGRADES_FROM)
def test_a_version_before_has_an_operator_a_worker_kinds_and_a_chart(version: str, tmp_path: Path) -> None:
    earlier = EarlierVersion(tmp_path, version)
    for folder in (earlier.operator_sources / "diffusion_operator", earlier.worker_sources / "diffusion_worker", earlier.chart):
        assert folder.is_dir()
    assert len(earlier.crds) == 2
    for program in (earlier.operator_program, earlier.worker_program):
        assert (earlier.support / f"{program}.py").is_file()


def test_a_shallow_clone_fails_with_the_commit_and_the_remedy(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(tmp_path / "clone")], check=True)
    version, commit = next(iter(UPGRADES_FROM.items()))
    with pytest.raises(AssertionError, match=f"expected commit {commit[:7]}.*git fetch --unshallow"):
        EarlierVersion(tmp_path / "earlier", version, clone=tmp_path / "clone")


def test_each_release_of_this_clone_is_a_version_to_upgrade_from() -> None:
    tags = subprocess.run(["git", "tag", "--list", "v*", "--format=%(refname:short)"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {tag.removeprefix("v") for tag in tags.stdout.split()} - {package_version("worker")} <= UPGRADES_FROM.keys()


def test_the_workflow_that_runs_the_tests_has_the_history() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    (checkout,) = [one for one in steps if one.get("uses", "").startswith("actions/checkout")]
    assert checkout["with"]["fetch-depth"] == 0
