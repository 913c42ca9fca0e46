# SPDX-License-Identifier: Apache-2.0
"""`diffusion-operator run`: what it refuses, before anything is started, and what it starts with."""

from pathlib import Path
from typing import Any

import kopf
import pytest
from click.testing import CliRunner

from diffusion_operator import __main__ as program
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.settings import Settings


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("k" * 32 + "\n")
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(program.main, ["run", "--engine-image", "i", *arguments])
    return result.exit_code, result.output


def test_namespaces_or_all_of_them_must_be_said(key_file: Path) -> None:
    for scope in ([], ["--namespace", "a", "--all-namespaces"]):
        code, output = run("--operator-key-file", str(key_file), *scope)
        assert code == 2
        assert "either --namespace, once or more, or --all-namespaces" in output


def test_a_missing_or_short_key_is_named(tmp_path: Path) -> None:
    code, output = run("--operator-key-file", str(tmp_path / "none"), "--all-namespaces")
    assert (code, "cannot be read" in output) == (2, True)
    (tmp_path / "short").write_text("abc")
    code, output = run("--operator-key-file", str(tmp_path / "short"), "--all-namespaces")
    assert (code, "has 3 bytes, expected at least 16" in output) == (2, True)


@pytest.mark.parametrize(
    ("scope", "namespaces", "everywhere"), [(["--namespace", "a", "--namespace", "b"], ("a", "b"), False), (["--all-namespaces"], (), True)]
)
def test_kopf_is_started_standalone_over_the_namespaces(
    scope: list[str], namespaces: tuple[str, ...], everywhere: bool, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(kopf, "run", lambda **arguments: started.update(arguments))
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    code, output = run("--operator-key-file", str(key_file), "--liveness-port", "9", *scope)
    assert (code, output) == (0, "")
    assert (started["namespaces"], started["clusterwide"], started["standalone"]) == (namespaces, everywhere, True)
    assert started["liveness_endpoint"] == "http://0.0.0.0:9/healthz"
    assert started["settings"].scanning.disabled is not everywhere


def test_settings_come_from_the_environment_too(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf, "run", lambda **_: None)
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    environment = {"DIFFUSION_OPERATOR_RUN_ENGINE_IMAGE": "i", "DIFFUSION_OPERATOR_RUN_OPERATOR_KEY_FILE": str(key_file)}
    result = CliRunner().invoke(program.main, ["run", "--all-namespaces"], env=environment)
    assert result.exit_code == 0, result.output


def test_only_event_handlers_are_registered() -> None:
    """Any other handler of kopf would write annotations or finalizers."""
    settings = Settings(engine_image="i", operator_key=b"k" * 16)
    registry = build_registry(Process(settings))
    assert len(registry._watching.get_all_handlers()) == 5
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not others.get_all_handlers()
    assert build_kopf_settings(settings).posting.enabled is False
