# SPDX-License-Identifier: Apache-2.0
"""The choice of a cluster and of kind's engine by the environment, and a given cluster, which cannot run everywhere."""

from pathlib import Path

import pytest

from tools.devcluster import cluster, images
from tools.devcluster.errors import NotRunning, PrerequisiteMissing
from tools.devcluster.kind.engine import Engine, kubeconfig
from tools.devcluster.kind.machines_engine import MachinesEngine
from tools.devcluster.kind.own_engine import OwnEngine, disk_needed_gb
from tools.devcluster.providers.given import GivenProvider, registry_reference
from tools.devcluster.providers.kind import KindProvider


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, False),
        ({"KUBECONFIG": "/home/me/kubeconfig"}, True),
        ({"CLUSTER": "staging"}, True),
        ({"KUBECONFIG": str(kubeconfig(OwnEngine()))}, False),
        ({"KUBECONFIG": str(kubeconfig(MachinesEngine()))}, False),
    ],
)
def test_a_cluster_is_given_by_another_kubeconfig_than_ours_or_by_a_context(environment: dict[str, str], given: bool) -> None:
    assert cluster.is_given(environment) is given


@pytest.mark.parametrize(("docker", "engine"), [(True, MachinesEngine), (False, OwnEngine)])
def test_kind_takes_the_machines_engine_before_our_own(monkeypatch: pytest.MonkeyPatch, docker: bool, engine: type) -> None:
    for name in ("KUBECONFIG", "CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(images, "docker_answers", lambda: docker)
    found = cluster.provider()
    assert isinstance(found, KindProvider) and type(found.engine) is engine


@pytest.mark.parametrize("engine", [MachinesEngine(), OwnEngine()])
def test_without_a_kubeconfig_the_kind_cluster_is_not_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Engine) -> None:
    monkeypatch.setattr(type(engine), "state", tmp_path)
    assert not KindProvider(engine).running()
    with pytest.raises(NotRunning, match="devcluster up"):
        KindProvider(engine).kubeconfig()


def test_a_given_kubeconfig_is_used_as_it_is() -> None:
    assert GivenProvider({"KUBECONFIG": "/home/me/kubeconfig"}).kubeconfig() == Path("/home/me/kubeconfig")


def test_an_image_for_a_given_cluster_is_named_in_the_registry() -> None:
    assert (
        registry_reference("registry.example.com/me/", "localhost/diffusion-worker:0123") == "registry.example.com/me/diffusion-worker:0123"
    )


@pytest.mark.parametrize("registry", [None, ""])
def test_a_given_cluster_without_a_registry_is_told_what_to_set(registry: str | None) -> None:
    with pytest.raises(PrerequisiteMissing, match="Set REGISTRY to a registry"):
        registry_reference(registry, "localhost/diffusion-worker:0123")


def test_a_given_cluster_without_its_file_or_its_registry_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteMissing, match="there is no file /nowhere/kubeconfig"):
        GivenProvider({"KUBECONFIG": "/nowhere/kubeconfig"}).check()
    (tmp_path / "kubeconfig").touch()
    with pytest.raises(PrerequisiteMissing, match="Set REGISTRY"):
        GivenProvider({"KUBECONFIG": str(tmp_path / "kubeconfig")}).check()


def test_only_what_is_not_there_yet_counts_for_the_disk(tmp_path: Path) -> None:
    everything = disk_needed_gb(tmp_path)
    assert 35 <= everything <= 40
    (tmp_path / "kube-0123456789ab").mkdir()
    (tmp_path / "storage").mkdir()
    assert disk_needed_gb(tmp_path) < everything - 10
