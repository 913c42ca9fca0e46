# SPDX-License-Identifier: Apache-2.0
"""The node: its files and command lines fit together, and its processes end for certain. The cluster tests run the node itself."""

import base64
import ipaddress
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.devcluster import processes
from tools.devcluster.certs import Authority
from tools.devcluster.node import config, daemons, namespace


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("certs") / "ca")
    made.service_account_key()
    made.issue("server", user="kube-apiserver", group="kube", addresses=("DNS:localhost", "IP:127.0.0.1"))
    made.issue("admin", user="kubernetes-admin", group="system:masters")
    return made


def all_commands() -> dict[str, daemons.Command]:
    debian, containerd, etcd, kube = (Path("/cache") / name for name in ("debian", "containerd", "etcd", "kube"))
    return daemons.storage(debian, containerd, etcd) | daemons.apiserver(kube) | daemons.controllers(kube)


def test_every_configuration_file_parses_and_every_one_named_is_written() -> None:
    files = config.files(config.first_node(), debian=Path("/cache/debian"), pause_image="localhost/pause:1")
    for file, text in files.items():
        if file.suffix in {".json", ".conflist"}:
            json.loads(text)
    named = {Path(m) for m in re.findall(rf"{config.CONF}/[\w.-]+", " ".join(str(w) for c in all_commands().values() for w in c))}
    assert {n for n in named if n.suffix != ".kubeconfig"} <= set(files)


def test_the_nodes_networks_keep_apart() -> None:
    networks = [ipaddress.ip_network(n) for n in config.NETWORKS]
    assert not any(a.overlaps(b) for a in networks for b in networks if a is not b)
    for address, network in zip((config.NODE_IP, config.DNS_IP), networks[:2], strict=True):
        assert ipaddress.ip_address(address) in network
    assert str(networks[1][1]) == config.KUBERNETES_IP


def test_the_name_servers_manifest_names_its_image_and_address() -> None:
    manifest = config.coredns_manifest("localhost/coredns:1")
    assert "image: localhost/coredns:1\n" in manifest
    assert f"clusterIP: {config.DNS_IP}\n" in manifest


def test_a_certificate_is_the_authoritys_and_serves_its_addresses(authority: Authority) -> None:
    words = ["openssl", "verify", "-CAfile", str(authority.file("ca.crt")), "-verify_ip", "127.0.0.1", str(authority.file("server.crt"))]
    subprocess.run(words, check=True, capture_output=True)
    assert authority.file("server.key").stat().st_mode & 0o077 == 0


def test_a_kubeconfig_needs_no_other_file_and_is_private(authority: Authority, tmp_path: Path) -> None:
    file = authority.kubeconfig("admin", server="https://127.0.0.1:6443", target=tmp_path / "kubeconfig")
    document = json.loads(file.read_text())
    assert document["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:6443"
    assert base64.b64decode(document["users"][0]["user"]["client-certificate-data"]) == authority.file("admin.crt").read_bytes()
    assert file.stat().st_mode & 0o077 == 0


def test_an_authority_that_is_there_already_signs_for_another_node(authority: Authority) -> None:
    root = authority.file("ca.crt").read_bytes()
    again = Authority.existing(authority.directory)
    again.issue("kubelet-node2", user="system:node:node2", group="system:nodes", addresses=("IP:127.0.0.1",))
    assert again.file("ca.crt").read_bytes() == root
    words = ["openssl", "verify", "-CAfile", str(authority.file("ca.crt")), str(again.file("kubelet-node2.crt"))]
    subprocess.run(words, check=True, capture_output=True)


def test_two_nodes_share_neither_a_file_nor_an_address_nor_a_control_group() -> None:
    one, other = config.first_node(), config.second_node()
    mine, its = (config.files(node, debian=Path("/cache/debian"), pause_image="localhost/pause:1") for node in (one, other))
    assert not set(mine) & set(its)
    text = "".join(its.values()).replace(str(config.CERTS), "")
    assert not [word for word in (f"{one.state}/", f"{one.run}/", one.pods, f'"{one.name}"') if word in text]
    assert one.cgroup != other.cgroup and one.containerd_root != other.containerd_root
    for network in (one.pods, other.pods):
        assert ipaddress.ip_network(network).subnet_of(ipaddress.IPv4Network(config.POD_NETWORKS))


def test_a_process_is_found_again_by_its_note_and_ended(tmp_path: Path) -> None:
    process = processes.start("sleeper", ["sleep", "600"], log=tmp_path / "log")
    processes.save([process], tmp_path / "note")
    (found,) = processes.load(tmp_path / "note")
    assert found.alive()
    found.stop()
    assert not found.alive()


def test_a_process_keeps_nothing_open_that_our_caller_left_open_to_us(tmp_path: Path) -> None:
    """Start a process while an inheritable pipe is open: the pipe has to end once this side is closed.

    A caller's lock, such as that of `flock`, would otherwise stay taken.
    """
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    process = processes.start("sleeper", ["sleep", "600"], log=tmp_path / "log")
    os.close(writing)
    try:
        os.set_blocking(reading, False)
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert process.alive()
        assert os.read(reading, 1) == b"", "the other end is closed everywhere"
    finally:
        process.stop()
        os.close(reading)


def test_a_process_that_does_not_listen_is_ended_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    process = processes.start("deaf", [sys.executable, "-c", deaf], log=tmp_path / "log")
    while "deaf" not in (tmp_path / "log").read_text():
        assert process.alive()
    process.stop()
    assert not process.alive()


def test_another_process_with_the_same_pid_is_left_alone() -> None:
    stranger = processes.Process("ours-once", os.getpid(), started_ticks=1)
    assert not stranger.alive()
    stranger.stop()


@pytest.mark.parametrize("text", ["", "[{", '[{"name": "half"}]'])
def test_half_a_note_of_a_killed_run_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert processes.load(tmp_path / "note") == []
    assert processes.load(tmp_path / "nowhere") == []


def test_pods_cgroups_are_found_on_both_versions(tmp_path: Path) -> None:
    for folder in ("memory/kubepods", "cpu/kubepods", "kubepods", "memory/other"):
        (tmp_path / folder).mkdir(parents=True)
    assert set(namespace.leftover_cgroups(tmp_path)) == {tmp_path / f for f in ("memory/kubepods", "cpu/kubepods", "kubepods")}


def test_a_second_kubelets_control_groups_may_use_what_the_machine_has(tmp_path: Path) -> None:
    """Make a second kubelet's groups in both versions.

    A new cpuset of version 1 is empty, so the parent's cores are copied into it; version 2 needs no copy.
    """
    first, second = tmp_path / "v1", tmp_path / "v2"
    for folder in (first / "cpuset", first / "memory", second / "system.slice"):
        folder.mkdir(parents=True)
    (first / "cpuset" / "cpuset.cpus").write_text("0-1\n")
    (first / "cpuset" / "second").mkdir()
    (first / "cpuset" / "second" / "cpuset.cpus").write_text("\n")
    (second / "cgroup.controllers").touch()
    namespace.make_cgroups("second", first)
    namespace.make_cgroups("second", second)
    assert (first / "cpuset/second/cpuset.cpus").read_text() == "0-1\n" and (first / "memory/second").is_dir()
    assert set(namespace.cgroups_named("second", second)) == {second / "second"}
