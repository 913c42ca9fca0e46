# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of unpacked Debian packages, in pid, network and mount namespaces of its own: for root on Linux where no engine answers.

A cable (a veth pair) leads from the machine to the engine; kind publishes the API server at its inner end. Services and pods answer from
the machine by routes over it. Nothing leads out: what the nodes run is in their image or in the registry beside the engine.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import checks, images, processes, programs
from ..cache import locked_if_free
from ..errors import CommandFailed
from ..paths import KIND_STATE, cache_dir, log_dir
from ..processes import Process
from ..progress import run_logged, run_quiet, step
from . import machine, namespace, node_image
from .engine import LINK_NETWORK, POD_NETWORK, SERVICE_NETWORK, docker, ready

MARK = "diffusion-operator-kind"
INNER_IP, MACHINE_IP = "198.18.2.1", "198.18.2.254"
REGISTRY = f"{INNER_IP}:5000"
LOCKS = Path("/run/diffusion-operator")
"""The folder of the engine's lock, which is the machine's as the engine is, whatever cache a command has."""
# nft is for tests, which drop packets of pods; openssl is for their API servers.
NEEDED = ("ip", "iptables", "nft", "nsenter", "openssl", "setpriv", "sysctl")
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
# Run on the node's image, with a folder of images that an earlier cluster left.
_FORGET_CONTAINERS = """
containerd > /tmp/log 2>&1 &
until ctr version > /dev/null 2>&1; do kill -0 $!; sleep 0.1; done
ctr --namespace k8s.io containers list --quiet | xargs --no-run-if-empty ctr --namespace k8s.io containers delete
kill $!; wait
"""


class OwnEngine:
    """The engine of our own, one a machine. `end` restores the machine and leaves the cache."""

    state = KIND_STATE
    locks = LOCKS
    networking: Mapping[str, object] = {"apiServerAddress": INNER_IP, "apiServerPort": 6443}

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something for the cluster with all our images on its nodes; change nothing."""
        checks.linux_root()
        checks.go()
        checks.disk_free(cache_dir(), needed_gb=disk_needed_gb(cache_dir()), what="Parts not in the cache yet (programs, images, kind)")
        if not self.alive():
            checks.memory_free(needed_gb=checks.MEMORY_GB)
            checks.networks_free([LINK_NETWORK, SERVICE_NETWORK, POD_NETWORK], own_link=machine.LINK)

    def prepare(self) -> None:
        """Install missing Debian packages, and make every program and the parts of the node's image that need no engine."""
        programs.install_debian_packages(NEEDED)
        for make in (programs.docker, programs.kind, programs.debian):
            make()
        node_image.prepare()

    def alive(self) -> bool:
        """Return whether the engine runs: its namespaces and all its programs live."""
        noted = processes.load(_NOTE)
        return bool(noted) and namespace.first_process(MARK) is not None and all(process.alive() for process in noted)

    def up(self) -> None:
        """Make sure that the engine runs. If it does not, undo what a killed engine left on the machine, and start one.

        The programs in NEEDED must be installed.

        Raises:
            CommandFailed: a program of the engine did not start; all changes to the machine are undone.
        """
        if self.alive():
            return
        self.end()
        folder = programs.docker()  # before anything is changed: it is slow the first time
        with step("kind: Docker engine"):
            machine.record()
            try:
                self._start(folder)
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Stop the engine with its containers, undo its changes to the machine, and delete KIND_STATE."""
        namespace.end_processes(MARK)
        for process in processes.load(_NOTE):  # the waiting halves, on the machine's side
            process.stop()
        machine.restore()
        shutil.rmtree(KIND_STATE, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return this process's environment with PATH and DOCKER_HOST such that `docker` and `kind` use this engine."""
        path = os.pathsep.join([str(programs.docker() / "usr/bin"), checks.SYSTEM_PATH])
        return {**os.environ, "PATH": path, "DOCKER_HOST": f"unix://{_SOCKET}"}

    def node_image(self) -> str:
        """Return the image of kind's nodes, built from our own parts unless the engine has it."""
        return node_image.build(self, REGISTRY)

    def kept_images(self, image: str) -> Path:
        """Return a folder of the cache with what the node's image has for containerd, and with images that earlier clusters unpacked.

        Containers of earlier clusters are forgotten, since a new kubelet would take them for its own.
        """
        folder = cache_dir() / "node-images"
        made_of = folder / "made-of"
        known = made_of.exists() and made_of.read_text() == image
        made_of.unlink(missing_ok=True)  # what fails or is killed from here on is made anew by the next call
        with step("kind: images of earlier clusters"):
            if known:
                volume = f"--volume={folder}:/var/lib/containerd"
                docker(self, "run", "--rm", "--privileged", "--entrypoint=sh", volume, image, "-euc", _FORGET_CONTAINERS, deadline_s=120)
            else:
                shutil.rmtree(folder, ignore_errors=True)
                copy = [f"--volume={folder}:/kept", image, "-a", "/var/lib/containerd/.", "/kept"]
                docker(self, "run", "--rm", "--entrypoint=cp", *copy, deadline_s=300)
        made_of.write_text(image)
        return folder

    def lead_to(self, node_ip: str) -> None:
        """Lead packets of this machine for Services and pods through the engine to the node."""
        for network in (SERVICE_NETWORK, POD_NETWORK):
            self._inside("ip", "route", "replace", network, "via", node_ip)
            run_quiet(["ip", "route", "replace", network, "via", INNER_IP, "dev", machine.LINK], env=namespace.environment())
        self._inside("iptables", "--insert", "FORWARD", "--in-interface", _INNER_LINK, "--jump", "ACCEPT")

    def kubectl(self) -> Path:
        """Return the kubectl of the nodes' Kubernetes. Unless cached, it is built first."""
        return programs.kube() / "kubectl"

    def load(self, reference: str, nodes: Sequence[str]) -> None:
        """Push the layers that the registry lacks, and have each node pull and unpack the image."""
        images.push(reference, f"docker://{REGISTRY}/{reference.removeprefix('localhost/')}", tls=False)
        for node in nodes:
            words = ["docker", "exec", node, "cri-pull", "--endpoint", "unix:///run/containerd/containerd.sock", reference]
            log = log_dir() / "kind-pull.log"
            run_logged(words, what=f"{node} unpacks {reference}", log=log, env=self.environment(), deadline_s=1200)

    def _inside(self, *words: str | Path) -> None:
        pid = namespace.first_process(MARK)
        assert pid is not None, "kind's engine is not running"
        run_quiet([*namespace.entering(pid), *words], env=namespace.environment())

    def _start(self, folder: Path) -> None:
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
        storage = {"filesystem": {"rootdirectory": str(cache_dir() / "registry")}}
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
        self._wait_answers(running)
        if left := docker(self, "ps", "--all", "--quiet").split():  # left by an engine that was killed
            docker(self, "rm", "--force", "--volumes", *left)

    def _wait_answers(self, running: list[Process]) -> None:
        ends = time.monotonic() + ANSWER_S
        while True:
            try:
                docker(self, "version", "--format", "{{.Server.Version}}", deadline_s=10)
                return
            except CommandFailed as error:
                dead = [process.name for process in running if not process.alive()]
                if dead or time.monotonic() > ends:
                    gone = f"{dead} ended" if dead else str(error)
                    raise CommandFailed(f"kind's Docker engine does not answer: {gone}; the logs are in {log_dir()}") from None
                time.sleep(0.1)


def restore_left() -> None:
    """Put back what a killed run left, unless a cluster runs on it or another command is at work on it."""
    if os.geteuid() == 0 and machine.RECORD.exists():
        with locked_if_free("kind", directory=LOCKS) as alone:
            engine = OwnEngine()
            if alone and machine.RECORD.exists() and not (ready(engine).exists() and engine.alive()):
                engine.end()


def disk_needed_gb(cache: Path) -> float:
    """Estimate the gigabytes that `up` and builds of images still need, from the parts that `cache` lacks.

    The sizes were measured with PyPI's torch: Go's caches and programs, then images as built, in the registry, and unpacked on the nodes.
    Two gigabytes more are for a later build and its logs.
    """
    missing = {"kube-*": 7.0, "storage": 6.0, "registry": 6.0, "docker": 8.0, "node-images": 6.0, "kind-root-*": 2.0}
    return 2.0 + sum(size for pattern, size in missing.items() if not any(cache.glob(pattern)))
