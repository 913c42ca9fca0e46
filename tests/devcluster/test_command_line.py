# SPDX-License-Identifier: Apache-2.0
"""What a person or a Makefile sees: results on stdout, errors as a sentence and code 1."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.devcluster import cli, images


def test_an_error_is_a_sentence_and_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVCLUSTER_PROVIDER", "minikube")
    result = CliRunner().invoke(cli.main, ["kubeconfig"])
    assert result.exit_code == 1
    assert result.stderr == "error: DEVCLUSTER_PROVIDER is 'minikube'; it must be given, kind or node\n"
    assert result.stdout == ""


def test_status_of_a_cluster_that_is_not_there_is_one_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEVCLUSTER_PROVIDER", "kind")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(cli.main, ["status", "--json"])
    assert json.loads(result.stdout) == {"provider": "kind", "running": False}


def test_build_image_prints_the_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "build", lambda image: f"localhost/diffusion-{image}:0123")
    assert CliRunner().invoke(cli.main, ["build-image", "worker"]).stdout == "localhost/diffusion-worker:0123\n"


@pytest.mark.parametrize("arguments", [["build-image", "engine"], ["exec"], ["nonsense"], ["load-image"]])
def test_a_wrong_command_line_is_explained(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
