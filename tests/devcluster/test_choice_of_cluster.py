# SPDX-License-Identifier: Apache-2.0
"""The choice of a provider by the environment, and the command lines of the two providers that cannot run everywhere."""

from pathlib import Path

import pytest

from tools.devcluster import cluster
from tools.devcluster.errors import DevclusterError, NotRunning, PrerequisiteMissing
from tools.devcluster.node import config
from tools.devcluster.providers import kind
from tools.devcluster.providers.given import GivenProvider, registry_reference
from tools.devcluster.providers.node import disk_needed_gb


@pytest.mark.parametrize(
    ("environment", "docker", "expected"),
    [
        ({}, False, "node"),
        ({}, True, "kind"),
        ({"KUBECONFIG": "/home/me/kubeconfig"}, True, "given"),
        ({"CLUSTER": "staging"}, True, "given"),
        ({"KUBECONFIG": str(config.KUBECONFIG)}, False, "node"),
        ({"KUBECONFIG": str(config.KUBECONFIG)}, True, "node"),
        ({"DEVCLUSTER_PROVIDER": "node", "KUBECONFIG": "/home/me/kubeconfig"}, True, "node"),
    ],
)
def test_a_given_cluster_comes_before_kind_and_kind_before_our_own_node(environment: dict[str, str], docker: bool, expected: str) -> None:
    assert cluster.provider_name(environment, docker=docker) == expected


def test_an_unknown_provider_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVCLUSTER_PROVIDER", "minikube")
    with pytest.raises(DevclusterError, match="'minikube'; it must be given, kind or node"):
        cluster.provider()


def test_kind_makes_one_cluster_of_our_name_and_keeps_the_users_kubeconfig_alone() -> None:
    command = kind.create_command(Path("/bin/kind"), Path("/cache/kind.kubeconfig"))
    assert command == [
        *("/bin/kind", "create", "cluster", "--name", "diffusion-operator"),
        *("--kubeconfig", "/cache/kind.kubeconfig", "--wait", "300s"),
    ]


def test_kind_loads_an_image_from_the_docker_engine_into_our_cluster() -> None:
    command = kind.load_command(Path("/bin/kind"), "localhost/diffusion-worker:0123")
    assert command == ["/bin/kind", "load", "docker-image", "localhost/diffusion-worker:0123", "--name", "diffusion-operator"]


def test_without_a_kubeconfig_the_kind_cluster_is_not_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not kind.KindProvider().running()
    with pytest.raises(NotRunning, match="devcluster up"):
        kind.KindProvider().kubeconfig()


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
    assert 25 <= everything <= 30
    (tmp_path / "kube-0123456789ab").mkdir()
    (tmp_path / "storage").mkdir()
    assert disk_needed_gb(tmp_path) < everything - 10
