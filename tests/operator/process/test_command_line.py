# SPDX-License-Identifier: Apache-2.0
"""`diffusion-operator run`: options that it refuses before anything is started, and its settings at the start."""

import itertools
from pathlib import Path
from typing import Any

import kopf
import pytest
from click.testing import CliRunner

from diffusion_operator import __main__ as program
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.reconcile.store.watched_cluster import DECLARED_KINDS
from diffusion_operator.settings import OperatorPods, Settings, operator_pods, read_operator_keys


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


def test_keys_stand_one_a_line_and_the_first_is_the_current_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{'n' * 32}\n\n  {'o' * 32}\r\n")
    assert read_operator_keys(path) == (b"n" * 32, b"o" * 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has 0 operator keys, expected 1 to 3"),
        ("k" * 32 + "\nabc\n", "operator key 2 in"),
        ("\n".join("k" * 32 for _ in range(4)), "has 4 operator keys"),
    ],
    ids=["none", "a short one", "too many"],
)
def test_keys_that_cannot_be_meant_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    code, output = run("--operator-key-file", str(tmp_path / "keys"), "--all-namespaces")
    assert (code, message in output) == (2, True)


def test_the_operators_own_pods_are_told_by_namespace_and_labels(key_file: Path) -> None:
    assert operator_pods("ns", ["a/b=c", "d="]) == OperatorPods(namespace="ns", labels={"a/b": "c", "d": ""})
    assert operator_pods(None, []) is None
    for arguments, message in (
        (["--operator-namespace", "ns"], "both or neither"),
        (["--operator-label", "a=b"], "both or neither"),
        (["--operator-namespace", "ns", "--operator-label", "a"], "expected NAME=VALUE"),
    ):
        code, output = run("--operator-key-file", str(key_file), "--all-namespaces", *arguments)
        assert (code, message in output) == (2, True)


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
    assert started["settings"].scanning.disabled is True, "no right to list CRDs or namespaces is needed"


def test_settings_come_from_the_environment_too(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf, "run", lambda **_: None)
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    environment = {"DIFFUSION_OPERATOR_RUN_ENGINE_IMAGE": "i", "DIFFUSION_OPERATOR_RUN_OPERATOR_KEY_FILE": str(key_file)}
    result = CliRunner().invoke(program.main, ["run", "--all-namespaces"], env=environment)
    assert result.exit_code == 0, result.output


def test_only_event_handlers_are_registered_one_for_each_kind_that_users_write() -> None:
    """Check that kopf has only event handlers, one for each kind that users write. Any other would write annotations or finalizers."""
    settings = Settings(engine_image="i", operator_key=b"k" * 16)
    registry = build_registry(Process(settings))
    assert {handler.id for handler in registry._watching.get_all_handlers()} == {kind.plural for kind in DECLARED_KINDS}
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not others.get_all_handlers()
    assert build_kopf_settings().posting.enabled is False


def test_a_watch_that_is_refused_never_ends_the_operator() -> None:
    """Check that the pauses between kopf's attempts never run out, since kopf ends when they do."""
    backoffs = build_kopf_settings().networking.error_backoffs
    for _ in range(2):
        pauses = list(itertools.islice(backoffs, 1000))  # type: ignore[arg-type]
        assert (len(pauses), pauses[0], pauses[-1]) == (1000, 1, 30)
