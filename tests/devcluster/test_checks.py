# SPDX-License-Identifier: Apache-2.0
"""A missing prerequisite: the error says how to get it, before anything is changed."""

import ipaddress
import sys
from pathlib import Path

import pytest

from tools.devcluster import checks, programs
from tools.devcluster.errors import PrerequisiteMissing

ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
vpn0\t000012C6\t00000000\t0001\t0\t0\t0\t0000FEFF\t0\t0\t0
"""
little_endian = pytest.mark.skipif(sys.byteorder == "big", reason="the table above is a little-endian machine's")


def fake_go(folder: Path, version: str) -> None:
    (folder / "go").write_text(f"#!/bin/sh\necho go version {version} linux/amd64\n")
    (folder / "go").chmod(0o755)


@little_endian
def test_the_kernels_routes_are_read() -> None:
    assert checks.routes(ROUTES)[1:] == [
        ("eth0", ipaddress.IPv4Network("192.0.2.0/24")),
        ("vpn0", ipaddress.IPv4Network("198.18.0.0/15")),
    ]


@little_endian
def test_a_network_that_the_machine_uses_already_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(ROUTES)
    with pytest.raises(PrerequisiteMissing, match=r"198.19.0.0/24, but this machine has a route to 198.18.0.0/15 by vpn0"):
        checks.networks_free(["198.19.0.0/24"], own_link="devcluster0", table=tmp_path / "route")
    checks.networks_free(["198.19.0.0/24"], own_link="vpn0", table=tmp_path / "route")
    checks.networks_free(["10.0.0.0/8"], own_link="devcluster0", table=tmp_path / "route")


def test_too_little_disk_is_said_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteMissing, match=r"Everything needs about 1000000 GB free under .*; there are \d"):
        checks.disk_free(tmp_path / "not" / "there" / "yet", needed_gb=1e6, what="Everything")


def test_too_little_memory_is_said_with_both_figures(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:        8000000 kB\nMemAvailable:    2500000 kB\n")
    with pytest.raises(PrerequisiteMissing, match=r"need about 4 GB of free memory; there are 2\.6"):
        checks.memory_free(needed_gb=4.0, table=tmp_path / "meminfo")
    checks.memory_free(needed_gb=2.0, table=tmp_path / "meminfo")


def test_a_missing_go_is_named_with_the_version_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda *_args, **_named: None)
    with pytest.raises(PrerequisiteMissing, match=r"Go 1\.26 or later is needed"):
        checks.go()


def test_an_old_go_is_refused_and_a_new_one_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    fake_go(tmp_path, "go1.19.8")
    with pytest.raises(PrerequisiteMissing, match=r"Go 1\.26 or later .*go1\.19\.8"):
        checks.go()
    fake_go(tmp_path, "go1.30.1")
    assert checks.go() == str(tmp_path / "go")


def test_an_engine_of_our_own_without_root_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "geteuid", lambda: 1000)
    with pytest.raises(PrerequisiteMissing, match="become root, start an engine, or set KUBECONFIG"):
        checks.linux_root()


def test_only_packages_of_missing_programs_are_installed(tmp_path: Path) -> None:
    (tmp_path / "ip").write_text("")
    (tmp_path / "ip").chmod(0o755)
    assert programs.missing_packages(("ip", "nft", "nsenter", "setpriv"), path=str(tmp_path)) == ["nftables", "util-linux"]


def test_debian_starts_no_service_while_we_install_and_its_policy_is_put_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with checks.no_services(policy):
        assert policy.read_text().endswith("exit 101\n")
        assert policy.stat().st_mode & 0o111
    assert not policy.exists()


def test_a_service_policy_that_is_there_stays(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("mine")
    with checks.no_services(policy):
        assert policy.read_text() == "mine"
    assert policy.read_text() == "mine"
