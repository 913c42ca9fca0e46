# SPDX-License-Identifier: Apache-2.0
"""Requirements of the machine, checked before anything is changed; a missing one is named with the way to get it."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import PrerequisiteMissing
from .progress import run_quiet

SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
GO_MINIMUM = (1, 26)
# Kubernetes' programs take 1.3 GB, the operator and a worker of two ranks 1.5; building Kubernetes at first peaks at 3.
MEMORY_GB = 4.0


def go() -> str:
    """Return the path of Go, from PATH or /usr/local/go/bin; raise PrerequisiteMissing if it is absent or older than GO_MINIMUM."""
    wanted = "Go {}.{} or later".format(*GO_MINIMUM)
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise PrerequisiteMissing(
            f"{wanted} is needed to build the cluster's programs and is not in PATH: unpack it from go.dev into /usr/local/go"
        )
    version = run_quiet([found, "version"])
    match = re.search(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < GO_MINIMUM:
        raise PrerequisiteMissing(
            f"{wanted} is needed to build the cluster's programs; {found} is {version.strip()!r}: unpack a newer one from go.dev"
        )
    return found


def linux_root() -> None:
    """Raise PrerequisiteMissing unless this is Linux, we are root, and apt-get and the overlay file system are there.

    Our own Docker engine needs these.
    """
    if sys.platform != "linux":
        raise PrerequisiteMissing(
            "Without a Docker engine the local cluster runs on Linux only: start a Docker engine, or set KUBECONFIG to a cluster of yours"
        )
    if os.geteuid() != 0:
        raise PrerequisiteMissing(
            "Without a Docker engine the local cluster needs root: become root, start an engine, or set KUBECONFIG to a cluster"
        )
    if shutil.which("apt-get", path=SYSTEM_PATH) is None:
        raise PrerequisiteMissing(
            "Without a Docker engine the local cluster takes containerd, runc and etcd from Debian packages, and there is no apt-get here"
        )
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        raise PrerequisiteMissing("The kernel offers no overlay file system, which containerd needs: load the module (modprobe overlay)")


def disk_free(directory: Path, *, needed_gb: float, what: str) -> None:
    """Raise PrerequisiteMissing if the disk of `directory` has less free room; `what` names in the message who needs it.

    If the directory is missing, its nearest existing parent is looked at.
    """
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < needed_gb:
        raise PrerequisiteMissing(
            f"{what} needs about {needed_gb:.0f} GB free under {existing}; there are {free_gb:.1f}. XDG_CACHE_HOME moves it elsewhere"
        )


def memory_free(*, needed_gb: float, table: Path = Path("/proc/meminfo")) -> None:
    """Raise PrerequisiteMissing if the kernel says that programs can have less memory than this; do nothing if it does not say."""
    match = re.search(r"(?m)^MemAvailable: +(\d+) kB$", table.read_text())
    free_gb = int(match[1]) * 1024 / 1e9 if match else needed_gb
    if free_gb < needed_gb:
        raise PrerequisiteMissing(
            f"The cluster and a worker need about {needed_gb:.0f} GB of free memory; there are {free_gb:.1f}: end other programs"
        )


def networks_free(networks: list[str], *, own_link: str, table: Path = Path("/proc/net/route")) -> None:
    """Raise PrerequisiteMissing if the machine has a route to a part of one of `networks`.

    Routes over `own_link`, the engine's own, and the default route do not count.
    """
    for link, taken in routes(table.read_text()):
        for network in networks:
            if link != own_link and taken.prefixlen > 0 and taken.overlaps(ipaddress.IPv4Network(network)):
                raise PrerequisiteMissing(f"The cluster wants the network {network}, but this machine has a route to {taken} by {link}")


def routes(table: str) -> list[tuple[str, ipaddress.IPv4Network]]:
    """Read the kernel's routes as (link, network) from the text of /proc/net/route, which has the machine's byte order."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return [(row[0], ipaddress.IPv4Network((_address(row[1]), str(_address(row[7]))))) for row in rows]


def _address(field: str) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(field), sys.byteorder))


@contextmanager
def no_services(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Keep Debian from starting services that it installs during the block, by a policy file that is removed afterwards.

    If there is a policy already, it stays as it is, and decides alone.
    """
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()
