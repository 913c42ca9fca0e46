# SPDX-License-Identifier: Apache-2.0
"""A Docker engine for kind, of unpacked Debian packages, in pid, network and mount namespaces of its own.

A cable (a veth pair) leads from the machine to the engine; kind publishes the API server at its inner end. Services and pods answer from
the machine by routes over it. Nothing leads out: what the nodes run is in their image or in the registry beside the engine.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from .. import checks, processes, programs
from ..errors import CommandFailed
from ..node import namespace
from ..node.config import registry_root
from ..paths import KIND_STATE, log_dir
from ..processes import Process
from ..progress import run_quiet, step
from . import machine

MARK = "diffusion-operator-kind"
# Beside those of our own node, so that both clusters can run at once; see node/config.py.
LINK_NETWORK, INNER_IP, MACHINE_IP = "198.18.2.0/24", "198.18.2.1", "198.18.2.254"
SERVICE_NETWORK, POD_NETWORK = "198.18.128.0/18", "198.19.128.0/17"
NETWORKS = (LINK_NETWORK, SERVICE_NETWORK, POD_NETWORK)
REGISTRY = f"{INNER_IP}:5000"
NEEDED = ("ip", "iptables", "nsenter", "setpriv", "sysctl")
ANSWER_S = 30.0

_SOCKET = KIND_STATE / "docker.sock"
_NOTE = KIND_STATE / "processes.json"
_INNER_LINK = "engine0"
# Root may lack CAP_SYS_RESOURCE, which Docker gives to privileged containers: runc would refuse to start them.
_RUNC = """#!/bin/bash
words=("$@")
for ((i = 0; i < ${#words[@]}; i++)); do
  case ${words[i]} in
  --bundle | -b) file=${words[i + 1]}/config.json ;;
  --process | -p) file=${words[i + 1]} ;;
  *) continue ;;
  esac
  [ -f "$file" ] && sed -i 's/"CAP_SYS_RESOURCE",//g; s/,"CAP_SYS_RESOURCE"//g' "$file"
done
exec THE_REAL_ONE "$@"
"""
# A sysfs of the new network namespace would hide the machine's control groups.
_INSIDE = f"""
mount --make-rprivate /
mkdir -p {KIND_STATE}/cgroup; mount --rbind /sys/fs/cgroup {KIND_STATE}/cgroup; mount -t sysfs sysfs /sys
mount --rbind {KIND_STATE}/cgroup /sys/fs/cgroup; umount -l {KIND_STATE}/cgroup
mount -t tmpfs tmpfs /run
mount --make-rshared /
sysctl -qw net.ipv4.ip_forward=1
ip link set lo up; ip link set {_INNER_LINK} up; ip addr add {INNER_IP}/24 dev {_INNER_LINK}
ip route add default via {MACHINE_IP} dev {_INNER_LINK}
"""


def alive() -> bool:
    """Return whether the engine runs: its namespaces and all its programs live."""
    noted = processes.load(_NOTE)
    return bool(noted) and namespace.first_process(MARK) is not None and all(process.alive() for process in noted)


def up() -> None:
    """Make sure that the engine runs. If it does not, undo what a killed engine left on the machine, and start one.

    The programs in NEEDED must be installed.

    Raises:
        CommandFailed: a program of the engine did not start; all changes to the machine are undone.
    """
    if alive():
        return
    end()
    folder = programs.docker()  # before anything is changed: it is slow the first time
    with step("kind: Docker engine"):
        machine.record()
        try:
            _start(folder)
        except BaseException:
            end()
            raise


def end() -> None:
    """Stop the engine with its containers, undo its changes to the machine, and delete KIND_STATE. Do nothing if all is done already."""
    namespace.end_processes(MARK)
    for process in processes.load(_NOTE):  # the waiting halves, on the machine's side
        process.stop()
    machine.restore()
    shutil.rmtree(KIND_STATE, ignore_errors=True)


def environment() -> dict[str, str]:
    """Return this process's environment with PATH and DOCKER_HOST such that `docker` and `kind` use this engine."""
    path = os.pathsep.join([str(programs.docker() / "usr/bin"), checks.SYSTEM_PATH])
    return {**os.environ, "PATH": path, "DOCKER_HOST": f"unix://{_SOCKET}"}


def docker(*words: str | Path, stdin: str | None = None, deadline_s: float = 60.0) -> str:
    """Run a short `docker` command on this engine and return its output; raise CommandFailed if it fails or is not done in time."""
    return run_quiet(["docker", *words], env=environment(), stdin=stdin, deadline_s=deadline_s)


def inside(*words: str | Path, stdin: str | None = None) -> str:
    """Run a short program in the engine's namespaces and return its output; raise CommandFailed if it fails. The engine must run."""
    pid = namespace.first_process(MARK)
    assert pid is not None, "kind's engine is not running"
    return run_quiet([*namespace.entering(pid), *words], stdin=stdin, env=namespace.environment())


def lead_to(node_ip: str) -> None:
    """Lead packets of this machine for Services and pods to kind's node with this address on Docker's network."""
    for network in (SERVICE_NETWORK, POD_NETWORK):
        inside("ip", "route", "replace", network, "via", node_ip)
        run_quiet(["ip", "route", "replace", network, "via", INNER_IP, "dev", machine.LINK], env=namespace.environment())
    inside("iptables", "--insert", "FORWARD", "--in-interface", _INNER_LINK, "--jump", "ACCEPT")


def _start(folder: Path) -> None:
    pid = namespace.unshare(programs.pause(), MARK, log=KIND_STATE / "init.log")
    outside = namespace.environment()
    run_quiet(["ip", "link", "add", machine.LINK, "type", "veth", "peer", "name", _INNER_LINK, "netns", str(pid)], env=outside)
    run_quiet([*namespace.entering(pid), "sh", "-e"], stdin=_INSIDE, env=outside)
    for line in (f"ip addr add {MACHINE_IP}/24 dev {machine.LINK}", f"ip link set {machine.LINK} up"):
        run_quiet(line.split(), env=outside)
    wrapper = KIND_STATE / "bin/runc"
    wrapper.parent.mkdir()
    wrapper.write_text(_RUNC.replace("THE_REAL_ONE", str(folder / "usr/sbin/runc")))
    wrapper.chmod(0o755)
    settings = KIND_STATE / "registry.json"
    storage = {"filesystem": {"rootdirectory": str(registry_root())}}
    settings.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": REGISTRY}}))
    folders = [wrapper.parent, folder / "usr/bin", folder / "usr/sbin"]
    variables = namespace.environment(*folders)
    commands: dict[str, list[str | Path]] = {
        "registry": [programs.debian() / "usr/bin/docker-registry", "serve", settings],
        "dockerd": [
            *("dockerd", "--host", f"unix://{_SOCKET}", "--data-root", machine.data_root(), "--exec-root", "/run/docker"),
            # No score below 0: that takes CAP_SYS_RESOURCE too.
            *("--pidfile", "/run/docker.pid", "--storage-driver", "overlay2", "--oom-score-adjust", "0"),
        ],
    }
    running: list[Process] = []
    for name, words in commands.items():
        log = log_dir() / f"kind-{name}.log"
        running.append(processes.start(name, [*namespace.entering(pid), *words], log=log, env=variables))
        processes.save(running, _NOTE)
    _wait_answers(running)
    if left := docker("ps", "--all", "--quiet").split():  # left by an engine that was killed
        docker("rm", "--force", "--volumes", *left)


def _wait_answers(running: list[Process]) -> None:
    ends = time.monotonic() + ANSWER_S
    while True:
        try:
            docker("version", "--format", "{{.Server.Version}}", deadline_s=10)
            return
        except CommandFailed as error:
            dead = [process.name for process in running if not process.alive()]
            if dead or time.monotonic() > ends:
                gone = f"{dead} ended" if dead else str(error)
                raise CommandFailed(f"kind's Docker engine does not answer: {gone}; the logs are in {log_dir()}") from None
            time.sleep(0.1)
