# SPDX-License-Identifier: Apache-2.0
"""A real single node on this machine, as root on Linux: where neither a cluster is given nor a Docker engine answers."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from .. import checks, images, processes, programs, scratch_image
from ..apiserver import wait_ready
from ..cache import content_hash, locked
from ..errors import CommandFailed, NotRunning
from ..node import config, daemons, joined, namespace, runtime
from ..own_nodes import OwnNodes
from ..paths import IMAGES_RUN, NODE_RUN, NODE_STATE, cache_dir
from ..processes import Process
from ..progress import run_logged, run_quiet, say, step

READY_DEADLINE_S = 120.0
_NOTE = NODE_STATE / "processes.json"
_NEEDED = ("conntrack", "ip", "iptables", "nft", "nsenter", "openssl", "setpriv", "sysctl")


class NodeProvider:
    """A real single node on this machine, as root on Linux. All programs are in the cache; `down` leaves the cache and nothing else."""

    name = "node"

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something: root on Linux, Go, room, memory or free networks. Change nothing."""
        checks.linux_root()
        checks.go()
        checks.disk_free(cache_dir(), needed_gb=disk_needed_gb(cache_dir()), what="Parts not in the cache yet (programs, images, node)")
        if namespace.first_process() is None:
            checks.memory_free(needed_gb=checks.MEMORY_GB)
            checks.networks_free(list(config.NETWORKS), own_link=config.MACHINE_LINK)

    def prepare(self) -> None:
        """Install missing Debian packages, then build or download all other programs; those in the cache cost nothing."""
        programs.install_debian_packages(_NEEDED)
        for make in (programs.debian, programs.containerd, programs.kube, programs.helm, programs.coredns, programs.pause):
            make()

    def up(self) -> None:
        """Start the node and wait until it is Ready, or find it running; clear first what a killed run left.

        If the start fails, the node's processes are ended.
        """
        self.check()
        self.prepare()
        with locked("node"):
            if self.running():
                say("the node is running")
                return
            self._end()
            try:
                self._start()
            except BaseException:
                namespace.end()
                raise

    def down(self, *, purge: bool) -> None:
        """End the node and a second one, and remove their state; with `purge` remove the cache too."""
        with locked("node"):
            self._end()
        with locked("images"):
            images.clear_unfinished()
            shutil.rmtree(IMAGES_RUN, ignore_errors=True)
        for parent in (NODE_STATE.parent, NODE_RUN.parent):
            with contextlib.suppress(OSError):  # it holds another of our files, or does not exist
                parent.rmdir()
        if purge:
            shutil.rmtree(cache_dir(), ignore_errors=True)

    def running(self) -> bool:
        """Return whether all processes live, the node is Ready, and the DNS Service exists, which `up` creates later than both."""
        noted = processes.load(_NOTE)
        if namespace.first_process() is None or not noted or not all(p.alive() for p in noted):
            return False
        if not config.KUBECONFIG.exists() or not self._node_ready():
            return False
        return bool(self._kubectl("get", "service", "kube-dns", "--namespace", "kube-system", "--output", "name"))

    def kubeconfig(self) -> Path:
        """Return the administrator's kubeconfig, whose address answers from this machine; raise NotRunning if the node does not run."""
        if namespace.first_process() is None:
            raise NotRunning("the node is not running: `python -m tools.devcluster up` starts it")
        return config.KUBECONFIG

    def kubectl(self) -> Path:
        """Return the path of a kubectl that matches the Kubernetes version of the node. Unless cached, it is built first."""
        return programs.kube() / "kubectl"

    def own_nodes(self) -> OwnNodes:
        """Return access to the inside of the node, so that tests can break it or add another node."""
        return joined.Nodes()

    def load_image(self, reference: str) -> str:
        """Push the layers that the node's registry lacks, have the node unpack the image, and return the same reference.

        Raises:
            NotRunning: there is no node.
        """
        self.kubeconfig()
        images.push(reference, f"docker://{config.REGISTRY}/{reference.removeprefix('localhost/')}", tls=False)
        pid = namespace.first_process()
        assert pid is not None
        pull = [*namespace.entering(pid), str(programs.kube() / "cri-pull"), "--endpoint", f"unix://{config.CONTAINERD_SOCKET}", reference]
        run_logged(pull, what=f"node unpacks {reference}", log=config.LOGS / "pull.log", env=namespace.environment(), deadline_s=1200)
        return reference

    def _start(self) -> None:
        debian, containerd, kube, etcd = programs.debian(), programs.containerd(), programs.kube(), programs.etcd()
        folders = daemons.folders(debian, containerd)
        small = {name: _small_image(program) for name, program in (("pause", programs.pause()), ("coredns", programs.coredns()))}
        NODE_STATE.mkdir(parents=True, mode=0o700)
        with step("node: certificates and namespaces"):
            authority = config.write_all(debian=debian, pause_image=small["pause"][0])
            pid = namespace.begin(programs.pause())
        running: list[Process] = []
        with step("node: etcd, containerd and API server"):
            _launch(pid, daemons.storage(debian, containerd, etcd) | daemons.apiserver(kube), running, folders)
            self._fill_containerd(pid, containerd, [archive for _, archive in small.values()], running, folders)
            wait_ready(config.SERVER, authority, running, config.LOGS)
        with step("node: Ready"):
            _launch(pid, daemons.controllers(kube), running, folders)
            self._wait_node(running)
        with step("node: CoreDNS"):
            self._start_coredns(small["coredns"][0])

    def _fill_containerd(self, pid: int, containerd: Path, archives: list[Path], running: list[Process], folders: list[Path]) -> None:
        node = config.first_node()
        left = runtime.forget_containers(node, pid, containerd)
        for archive in archives:
            namespace.run_inside(pid, [*daemons.ctr(node, containerd), "images", "import", archive])
        if left:
            old = next(p for p in running if p.name == "containerd")
            old.stop()
            running.remove(old)
            _launch(pid, {"containerd": daemons.containerd(node, containerd)}, running, folders)

    def _wait_node(self, running: list[Process]) -> None:
        ends = time.monotonic() + READY_DEADLINE_S
        while not self._node_ready():
            dead = [p.name for p in running if not p.alive()]
            if dead or time.monotonic() > ends:
                raise CommandFailed(f"the node is not Ready{f', {dead} ended' if dead else ''}; the logs are in {config.LOGS}")
            time.sleep(0.2)

    def _node_ready(self) -> bool:
        path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        return self._kubectl("get", "node", config.NODE_NAME, "-o", path).strip() == "True"

    def _kubectl(self, *words: str) -> str:
        with contextlib.suppress(CommandFailed):  # a question: no answer is an answer
            return run_quiet([self.kubectl(), "--kubeconfig", config.KUBECONFIG, "--request-timeout=5s", *words])
        return ""

    def _start_coredns(self, image: str) -> None:
        kubectl = [str(self.kubectl()), "--kubeconfig", str(config.KUBECONFIG)]
        run_quiet([*kubectl, "apply", "--filename", "-"], stdin=config.coredns_manifest(image))
        run_quiet([*kubectl, "rollout", "status", "deployment/coredns", "--namespace", "kube-system", "--timeout=60s"], deadline_s=70)

    def _end(self) -> None:
        joined.end()
        namespace.end()
        for process in processes.load(_NOTE):  # the waiting halves, on the machine's side
            process.stop()
        for folder in (NODE_RUN, NODE_STATE):
            shutil.rmtree(folder, ignore_errors=True)


def disk_needed_gb(cache: Path) -> float:
    """Estimate the gigabytes that `up` and builds of images still need, from the parts that `cache` lacks.

    The sizes were measured with PyPI's torch: Go's caches and programs, then images as built, in the registry, and unpacked on the node.
    Two gigabytes more are for a later build and its logs.
    """
    missing = {"kube-*": 7.0, "storage": 6.0, "node-registry": 6.0, "node-containerd": 6.0}
    return 2.0 + sum(size for pattern, size in missing.items() if not any(cache.glob(pattern)))


def _launch(pid: int, commands: dict[str, daemons.Command], running: list[Process], folders: list[Path]) -> None:
    for name, argv in commands.items():
        words = [*namespace.entering(pid), *argv]
        running.append(processes.start(name, words, log=config.LOGS / f"{name}.log", env=namespace.environment(*folders)))
        processes.save(running, _NOTE)


def _small_image(program: Path) -> tuple[str, Path]:
    reference = f"localhost/{program.name}:{content_hash([program], relative_to=program.parent)}"
    archive = program.parent / "image.tar"
    if not archive.exists():
        draft = archive.with_suffix(".draft")
        scratch_image.write(program, reference=reference, user="65535:65535", target=draft)
        draft.rename(archive)
    return reference, archive
