# SPDX-License-Identifier: Apache-2.0
"""Restoration of the machine by the next command, after a program of kind's engine was killed.

Real: the engine, the signals, and the machine's own control groups, links, mounts and sysctls, which are read without the provider's help.
Builds of container images may run at the same time: what they own is left out.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.devcluster import cluster, images
from tools.devcluster.cache import locked
from tools.devcluster.kind import machine, namespace
from tools.devcluster.kind.engine import FIRST, docker
from tools.devcluster.kind.own_engine import LOCKS, MARK, OwnEngine
from tools.devcluster.paths import IMAGES_RUN, REPOSITORY, image_store
from tools.devcluster.providers.kind import KindProvider

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

DEVCLUSTER = [sys.executable, "-m", "tools.devcluster"]
ENGINE_ALONE = [sys.executable, "-c", "from tools.devcluster.kind.own_engine import OwnEngine; OwnEngine().up()"]
# These change by themselves.
VOLATILE = ("random", "ns_last_pid", "pty", "perf_event_max_sample_rate", "ngroups_max")
START_S = 600.0


@pytest.fixture(autouse=True)
def no_cluster_of_kind() -> Iterator[None]:
    """Skip where another engine answers or a kind cluster runs; start with a clean engine, and end it afterwards."""
    where = cluster.provider()
    if not (isinstance(where, KindProvider) and isinstance(where.engine, OwnEngine)):
        pytest.skip("kind's engine is not our own here, since a cluster is given or a Docker engine answers")
    if where.running():
        pytest.skip("a kind cluster runs: `python -m tools.devcluster down` ends it")
    where.prepare()
    yield
    where.down(purge=False)


def look() -> dict[str, list[str]]:
    """Return what the engine may leave on this machine: sysctls with their values, cgroups, links and mounts.

    Sysctls that change by themselves (VOLATILE) are left out.
    """
    settings = [file for folder in ("vm", "kernel") for file in Path("/proc/sys", folder).rglob("*") if not set(file.parts) & set(VOLATILE)]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    others = (IMAGES_RUN, image_store())
    return {
        "sysctls": [f"{file} {file.read_text()}" for file in sorted(settings) if file.is_file() and file.stat().st_mode & 0o444],
        "cgroups": sorted(str(folder) for folder in Path("/sys/fs/cgroup").glob("*/*") if folder.is_dir()),
        "links": sorted(link.name for link in Path("/sys/class/net").iterdir()),
        "mounts": sorted(mount for mount in mounts if not any(Path(mount).is_relative_to(other) for other in others)),
    }


def eventually(what: str, look: Callable[[], object], *, deadline_s: float = START_S) -> None:
    ends = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < ends, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(f"process {pid} is gone", lambda: not Path(f"/proc/{pid}/root").exists(), deadline_s=60)


def find_dockerd() -> int | None:
    """Return the pid, as the machine counts, of the dockerd that kind's engine runs; None if there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        words = (entry / "cmdline").read_bytes().split(b"\0") if entry.exists() else [b""]
        if words[0].endswith(b"dockerd") and os.fsencode(machine.data_root()) in words:
            return int(entry.name)
    return None


def restored_by_the_next_command(before: dict[str, list[str]]) -> None:
    said = subprocess.run([*DEVCLUSTER, "status"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert said == "provider: kind\nrunning: False\n"
    # Another command of devcluster may have come first, and may still be busy.
    eventually("the machine is as before", lambda: not machine.RECORD.exists())
    assert look() == before


def test_after_a_kill_of_devcluster_the_machine_is_put_back() -> None:
    before = look()
    running = subprocess.Popen([*DEVCLUSTER, "up"], stderr=subprocess.DEVNULL)
    eventually("dockerd runs", find_dockerd)
    running.kill()
    running.wait(10)
    restored_by_the_next_command(before)


def test_after_a_kill_of_the_engines_first_process_the_machine_is_put_back() -> None:
    before = look()
    with locked("kind", directory=LOCKS):  # else a command beside this test would take the engine for a leftover
        subprocess.run(ENGINE_ALONE, check=True, timeout=START_S)
        kill(namespace.first_process(MARK))
    restored_by_the_next_command(before)


def test_a_killed_make_leaves_a_whole_cluster_and_after_a_kill_of_dockerd_the_machine_is_put_back() -> None:
    before = look()
    make = subprocess.Popen(["make", "cluster"], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually("the machine is recorded", machine.RECORD.exists)
    make.kill()
    make.wait(10)
    eventually("the cluster runs", cluster.provider().running)
    assert all(look()[kind] != before[kind] for kind in ("sysctls", "cgroups", "links")), "the cluster changed nothing"
    kill(find_dockerd())
    restored_by_the_next_command(before)


def test_images_that_a_cluster_unpacked_are_there_for_the_next_one() -> None:
    where, image = cluster.provider(), images.build("operator")
    where.up()
    where.load_image(image)
    where.down(purge=False)
    where.up()
    assert image in docker(OwnEngine(), "exec", FIRST, "crictl", "inspecti", image)
