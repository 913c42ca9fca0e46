# SPDX-License-Identifier: Apache-2.0
"""kind's cluster: its configuration is what we need, and containerd can import the archive of its container images."""

import ipaddress
import itertools
import json
import tarfile
from pathlib import Path

import pytest

from tools.devcluster import programs
from tools.devcluster.cache import locked
from tools.devcluster.errors import CommandFailed
from tools.devcluster.kind import kube_images, nodes, own_engine
from tools.devcluster.kind.engine import LINK_NETWORK, POD_NETWORK, SERVICE_NETWORK
from tools.devcluster.kind.own_engine import OwnEngine


def test_the_clusters_networks_are_apart() -> None:
    networks = map(ipaddress.ip_network, (LINK_NETWORK, SERVICE_NETWORK, POD_NETWORK))
    assert [pair for pair in itertools.combinations(networks, 2) if pair[0].overlaps(pair[1])] == []


def test_the_api_server_keeps_an_audit_log_and_the_kubelet_accepts_old_control_groups() -> None:
    made = nodes.configuration(OwnEngine())
    patches = [json.loads(patch) for patch in made["kubeadmConfigPatches"]]  # type: ignore[attr-defined]
    (kubelet, servers) = patches
    assert kubelet["failCgroupV1"] is False
    arguments = {argument["name"]: argument["value"] for argument in servers["apiServer"]["extraArgs"]}
    assert arguments["audit-log-path"] == "/var/log/devcluster/audit.log"
    assert made["networking"]["apiServerAddress"] == own_engine.INNER_IP  # type: ignore[index]


@pytest.mark.parametrize(("held", "ended"), [(True, 0), (False, 1)])
def test_a_killed_runs_engine_is_left_to_the_command_that_is_at_work_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: bool, ended: int
) -> None:
    monkeypatch.setattr(own_engine, "LOCKS", tmp_path)
    (tmp_path / "machine.json").touch()
    monkeypatch.setattr(own_engine.machine, "RECORD", tmp_path / "machine.json")
    monkeypatch.setattr(OwnEngine, "state", tmp_path)
    monkeypatch.setattr(own_engine.os, "geteuid", lambda: 0)
    ends: list[None] = []
    monkeypatch.setattr(OwnEngine, "end", lambda _: ends.append(None))
    with locked("kind" if held else "another", directory=tmp_path):
        own_engine.restore_left()
    assert len(ends) == ended


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the builds of Kubernetes, etcd, CoreDNS, pause and packet filters, which would take minutes, by files of a few bytes."""
    (tmp_path / "kube").write_text("all of Kubernetes")
    monkeypatch.setattr(programs, "kube", lambda: tmp_path)
    for name in ("etcd", "coredns", "pause"):
        (tmp_path / name).write_text(name)
        monkeypatch.setattr(programs, name, lambda name=name: tmp_path / name)
    (tmp_path / "tree").mkdir()
    monkeypatch.setattr(programs, "packet_filters", lambda: tmp_path / "tree")


@pytest.mark.usefixtures("small_programs")
def test_images_of_kubernetes_share_the_layer_of_its_programs(tmp_path: Path) -> None:
    names = [
        "registry.k8s.io/kube-apiserver:v1",
        "registry.k8s.io/kube-scheduler:v1",
        "registry.k8s.io/etcd:3",
        "registry.k8s.io/pause:3.10",
    ]
    kube_images.write(names, tmp_path / "images.tar")
    with tarfile.open(tmp_path / "images.tar") as tar:
        members = tar.getnames()
        manifest = {entry["RepoTags"][0]: entry for entry in json.load(tar.extractfile("manifest.json"))}  # type: ignore[arg-type]
        configs = {name: json.load(tar.extractfile(entry["Config"])) for name, entry in manifest.items()}  # type: ignore[arg-type]
    assert len(members) == len(set(members))
    assert manifest[names[0]]["Layers"] == manifest[names[1]]["Layers"] != manifest[names[2]]["Layers"]
    assert [configs[name]["config"]["Entrypoint"] for name in names] == [
        *(["kube-apiserver"], ["kube-scheduler"], ["/usr/local/bin/etcd"], ["/usr/local/bin/pause"])
    ]


@pytest.mark.usefixtures("small_programs")
def test_an_image_that_kubeadm_asks_for_and_we_do_not_make_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"the image registry.k8s.io/konnectivity:1; expected one of coredns, etcd"):
        kube_images.write(["registry.k8s.io/konnectivity:1"], tmp_path / "images.tar")
