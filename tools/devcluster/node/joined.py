# SPDX-License-Identifier: Apache-2.0
"""A second node beside the first: namespaces, containerd, kubelet and kube-proxy of its own, and a cable to the first one's.

The second node's images are hard links to those of the first, which takes seconds and no room. It pulls missing ones from the registry
beside the first. Nothing of it is kept, and it ends with the first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .. import processes, programs
from ..cache import locked
from ..certs import Authority
from ..errors import CommandFailed, NotRunning
from ..own_nodes import OwnNodes
from ..processes import Process
from ..progress import run_quiet, step
from . import config, daemons, namespace, runtime

READY_S, GONE_S = 90.0, 20.0
_MARK = f"{namespace.MARK}-second"
_LINK, _FIRST_LINK = "tonode1", "tonode2"  # the two ends of the cable: this node's, and the first node's
_NOTE = "processes.json"
# The runtime writes to these all the time; a link would make both write into one file.
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")


def add() -> str:
    """Join the second node to the running cluster and return its name; a node that is Ready already stays as it is.

    A half-started one is ended first, and a failed start leaves nothing behind.

    Raises:
        NotRunning: the first node, which it joins, does not run. CommandFailed: it is not Ready in time.
    """
    node = config.second_node()
    if namespace.first_process() is None:
        raise NotRunning("the first node is not running: `python -m tools.devcluster up` starts it")
    with locked("node2"), step("second node: Ready"):
        if namespace.first_process(_MARK) is not None and _ready(node):
            return node.name
        end()
        try:
            _start(node)
        except BaseException:
            end()
            raise
    return node.name


def remove() -> None:
    """Remove the second node and its pods from the cluster, and end it; without the first node, only end it. There may be none."""
    if namespace.first_process() is not None:
        _kubectl("delete", "node", config.SECOND_NAME, "--ignore-not-found", "--wait=false")
        with contextlib.suppress(CommandFailed):  # nobody else can say that they are gone
            _kubectl("delete", "pods", "-A", f"--field-selector=spec.nodeName={config.SECOND_NAME}", "--force", "--grace-period=0")
    with locked("node2"):
        end()


@contextmanager
def unplugged() -> Iterator[None]:
    """Unplug the second node's cable during the block: it and its pods run on, but nothing reaches them."""
    _in_first("ip", "link", "set", _FIRST_LINK, "down")
    try:
        yield
    finally:
        _in_first("ip", "link", "set", _FIRST_LINK, "up")
        _in_first("ip", "route", "replace", config.SECOND_POD_NETWORK, "via", config.SECOND_IP)


class Nodes(OwnNodes):
    """The first node on this machine, and the second if it was added."""

    first = config.NODE_NAME
    kubeconfig = config.KUBECONFIG
    audit_log = config.AUDIT_LOG
    kubelet = config.first_node().state / "kubelet"
    cdi = config.first_node().cdi

    def find_program(self, name: str) -> int | None:
        return namespace.find_program(name)

    def command(self, program: Path) -> list[str]:
        pid = namespace.first_process()
        if pid is None:
            raise NotRunning("the first node is not running: `python -m tools.devcluster up` starts it")
        return [*namespace.ending_with(pid), str(program)]

    def add_second(self) -> str:
        return add()

    def remove_second(self) -> None:
        remove()

    def unplugged(self) -> AbstractContextManager[None]:
        return unplugged()


def end() -> None:
    """End all that runs in the second node, and remove its routes, cgroups and folders from this machine; do nothing if there is none.

    The cluster still lists it.
    """
    node = config.second_node()
    namespace.end_processes(_MARK, deadline_s=GONE_S)
    for process in processes.load(node.state / _NOTE):
        process.stop()
    for network in (config.SECOND_LINK_NETWORK, node.pods):
        with contextlib.suppress(CommandFailed):  # there is none, or no cable to the first node any more
            run_quiet(["ip", "route", "delete", network, "dev", config.MACHINE_LINK], env=namespace.environment())
    namespace.remove_cgroups(lambda: namespace.cgroups_named(node.cgroup.lstrip("/")), time.monotonic() + GONE_S)
    for folder in (node.run, node.state, node.containerd_root):
        shutil.rmtree(folder, ignore_errors=True)


def _start(node: config.Node) -> None:
    debian, containerd, kube = programs.debian(), programs.containerd(), programs.kube()
    for folder in (node.state, node.run):
        folder.mkdir(parents=True)
    pause_image = _pause_image()
    config.write_node(Authority.existing(config.CERTS), node, debian=debian, pause_image=pause_image)
    _link_images(node)
    namespace.make_cgroups(node.cgroup.lstrip("/"))
    pid = namespace.unshare(programs.pause(), _MARK, log=node.logs / "init.log")
    _connect(node, pid)
    running: list[Process] = []

    def launch(commands: dict[str, daemons.Command]) -> None:
        for name, argv in commands.items():
            environment = namespace.environment(*daemons.folders(debian, containerd))
            running.append(processes.start(name, [*namespace.entering(pid), *argv], log=node.logs / f"{name}.log", env=environment))
            processes.save(running, node.state / _NOTE)

    launch({"containerd": daemons.containerd(node, containerd)})
    if runtime.forget_containers(node, pid, containerd):
        running.pop().stop()
        launch({"containerd": daemons.containerd(node, containerd)})
    launch(daemons.agents(node, kube))
    ends = time.monotonic() + READY_S
    while not _ready(node):
        if time.monotonic() > ends:
            raise CommandFailed(f"the second node is not Ready; its logs are in {node.logs}")
        time.sleep(0.3)


def _pause_image() -> str:
    words = (config.CONF / "containerd.toml").read_text()
    return words.split('sandbox = "')[1].split('"')[0]


def _link_images(node: config.Node) -> None:
    """Link the first node's images into this node while the first runtime is suspended.

    The databases are then as after a crash, which they are made for.
    """
    first = config.first_node().containerd_root
    standing = namespace.find_program("containerd")
    if standing is None:
        raise NotRunning("the first node has no containerd")
    os.kill(standing, signal.SIGSTOP)
    try:
        run_quiet(["cp", "--archive", "--link", "--no-target-directory", first, node.containerd_root], deadline_s=120)
        for name in _DATABASES:
            (node.containerd_root / name).unlink()
            shutil.copy2(first / name, node.containerd_root / name)
    finally:
        os.kill(standing, signal.SIGCONT)


def _connect(node: config.Node, second: int) -> None:
    environment = namespace.environment()
    _in_first("ip", "link", "add", _FIRST_LINK, "type", "veth", "peer", "name", _LINK, "netns", str(second))
    _in_first("ip", "addr", "add", f"{config.SECOND_GATEWAY}/24", "dev", _FIRST_LINK)
    _in_first("ip", "link", "set", _FIRST_LINK, "up")
    text = namespace.inside(node.run, link=_LINK, ip=node.ip, gateway=config.SECOND_GATEWAY)
    run_quiet([*namespace.entering(second), "sh", "-e"], stdin=text, env=environment)
    _in_first("ip", "route", "replace", node.pods, "via", node.ip)
    for network in (config.SECOND_LINK_NETWORK, node.pods):
        run_quiet(["ip", "route", "replace", network, "via", config.NODE_IP, "dev", config.MACHINE_LINK], env=environment)


def _in_first(*words: str) -> None:
    """Run a program in the first node's network namespace; its pids and files are the machine's.

    Raises:
        NotRunning: there is no first node.
    """
    first = namespace.first_process()
    if first is None:
        raise NotRunning("the first node is not running")
    run_quiet(["nsenter", "--target", str(first), "--net", "--", *words], env=namespace.environment())


def _ready(node: config.Node) -> bool:
    path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    return _kubectl("get", "node", node.name, "--ignore-not-found", "-o", path).strip() == "True"


def _kubectl(*words: str) -> str:
    return run_quiet([programs.kube() / "kubectl", "--kubeconfig", config.KUBECONFIG, "--request-timeout=10s", *words])
