# SPDX-License-Identifier: Apache-2.0
"""The output for a person or a Makefile: results on stdout, errors as a sentence and exit code 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.devcluster import cli, images, preflight
from tools.devcluster.kind.machines_engine import MachinesEngine
from tools.devcluster.paths import REPOSITORY


def test_an_error_is_a_sentence_and_exit_code_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(MachinesEngine, "state", tmp_path)
    monkeypatch.setattr(images, "docker_answers", lambda: True)
    result = CliRunner().invoke(cli.main, ["kubeconfig"])
    assert result.exit_code == 1
    assert result.stderr == "error: the kind cluster is not running: `python -m tools.devcluster up` starts it\n"
    assert result.stdout == ""


def test_status_of_a_cluster_that_is_not_there_is_one_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "docker_answers", lambda: True)
    result = CliRunner().invoke(cli.main, ["status", "--json"])
    assert json.loads(result.stdout) == {"provider": "kind", "running": False}


def test_the_preflight_says_what_is_missing_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    assert preflight.main() == 1
    assert (
        capsys.readouterr().err == "error: KUBECONFIG or CLUSTER asks for a cluster of your own, and there is no file /nowhere/kubeconfig\n"
    )


def test_the_preflight_of_an_old_python_asks_for_a_newer_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight.sys, "version_info", (3, 9, 2))
    assert preflight.main() == 1
    assert capsys.readouterr().err == "error: Python 3.11 or later is needed, this is 3.9.2: set PYTHON=/path/to/python3.11\n"


def test_the_preflight_needs_nothing_but_the_standard_library() -> None:
    known = "import sys; from tools.devcluster import preflight, cluster; print({'click', 'yaml', 'kubernetes'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", known], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout == "set()\n"


def test_build_image_prints_the_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "build", lambda image: f"localhost/diffusion-{image}:0123")
    assert CliRunner().invoke(cli.main, ["build-image", "worker"]).stdout == "localhost/diffusion-worker:0123\n"


@pytest.mark.parametrize("arguments", [["build-image", "engine"], ["exec"], ["nonsense"], ["load-image"]])
def test_a_wrong_command_line_is_explained(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
