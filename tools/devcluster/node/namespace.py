# SPDX-License-Identifier: Apache-2.0
"""The node's own pid, network and mount namespaces, whose first process is `pause`: ending that one ends all that runs in them.

Nothing of the machine is touched but a cable (a veth pair) with two routes to the node, and the pods' cgroups. The cable goes with the
namespace, and `end` removes the cgroups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import processes
from ..checks import SYSTEM_PATH
from ..errors import CommandFailed
from ..paths import NODE_RUN
from ..progress import run_quiet
from .config import LOGS, MACHINE_IP, MACHINE_LINK, NODE_IP, NODE_LINK, POD_NETWORK, SERVICE_NETWORK

MARK = "diffusion-operator-node"  # the argument by which a later run knows our first process

# The kubelet writes these for the whole machine; copies over them take its writes.
SYSCTLS = "vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes"


def inside(run: Path, *, link: str, ip: str, gateway: str) -> str:
    """Return the shell script that prepares a node's namespaces: mounts, sysctls of its own for kubelet, and its end of the veth pair.

    The default route is there for the node's own packets to a Service's address: without one they never reach the rules that translate it.
    """
    return f"""
mount --make-rprivate /
mkdir -p {run}/cgroup; mount --rbind /sys/fs/cgroup {run}/cgroup; mount -t sysfs sysfs /sys
mount --rbind {run}/cgroup /sys/fs/cgroup; umount -l {run}/cgroup
for f in {SYSCTLS}; do
  mkdir -p {run}/sysctl/${{f%/*}}; cat /proc/sys/$f > {run}/sysctl/$f; mount --bind {run}/sysctl/$f /proc/sys/$f
done
mount --make-rshared /
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.disable_ipv6=1
sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
ip link set lo up; ip link set {link} up; ip addr add {ip}/24 dev {link}
ip route add default via {gateway} dev {link}
"""


_OUTSIDE = (
    f"ip addr add {MACHINE_IP}/24 dev {MACHINE_LINK}",
    f"ip link set {MACHINE_LINK} up",
    f"ip route add {SERVICE_NETWORK} via {NODE_IP} dev {MACHINE_LINK}",
    f"ip route add {POD_NETWORK} via {NODE_IP} dev {MACHINE_LINK}",
)


def first_process(mark: str = MARK) -> int | None:
    """Return the pid of the first process of the node named `mark`, also if a killed run left it; None if there is none."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"pause") and words[1:2] == [mark.encode()]:
                    return int(entry.name)
    return None


def find_program(name: str, mark: str = MARK) -> int | None:
    """Find a process by its program's name in the node's own pid namespace, so in no container; return its pid on the machine, or None."""
    first = first_process(mark)
    for entry in Path("/proc").iterdir() if first is not None else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = (entry / "ns/pid").readlink() == Path(f"/proc/{first}/ns/pid").readlink()
                if ours and Path(os.fsdecode(words[0])).name == name:
                    return int(entry.name)
    return None


def begin(pause: Path) -> int:
    """Create the first node: a waiting process in new namespaces, wired to this machine by a veth pair. Return its pid.

    The machine gets routes through the node to the networks of Services and pods.
    """
    NODE_RUN.mkdir(parents=True, exist_ok=True)
    pid = unshare(pause, MARK, log=LOGS / "init.log")
    run_quiet(["ip", "link", "add", MACHINE_LINK, "type", "veth", "peer", "name", NODE_LINK, "netns", str(pid)], env=environment())
    run_quiet([*entering(pid), "sh", "-e"], stdin=inside(NODE_RUN, link=NODE_LINK, ip=NODE_IP, gateway=MACHINE_IP), env=environment())
    for line in _OUTSIDE:
        run_quiet(line.split(), env=environment())
    return pid


def unshare(pause: Path, mark: str, *, log: Path, deadline_s: float = 10.0) -> int:
    """Run `pause` as pid 1 of new network, mount and pid namespaces; return its pid on the machine, by which others enter them.

    `mark` is its argument, by which it is found. If it does not appear within `deadline_s` seconds, CommandFailed quotes the log.
    """
    apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "slave"]
    processes.start("init", [*apart, pause, mark], log=log)
    ends = time.monotonic() + deadline_s
    while (pid := first_process(mark)) is None:
        if time.monotonic() > ends:
            raise CommandFailed(f"the node's namespaces did not come up: {log.read_text().strip() or 'no message'}")
        time.sleep(0.02)
    return pid


def entering(pid: int) -> list[str]:
    """Return the words to put before a command so that it runs with the network, mounts and pids of process `pid`."""
    return ["nsenter", "--target", str(pid), "--net", "--mount", "--pid", "--"]


def ending_with(pid: int) -> list[str]:
    """Return words to put before a command, as `entering` does; the command also gets SIGTERM when the process that they start ends.

    Without that it would run on, because nsenter passes no signal on.
    """
    return [*entering(pid), "setpriv", "--pdeathsig", "TERM"]


def environment(*folders: Path) -> dict[str, str]:
    """Return PATH, with `folders` before the system's, and HOME, or /root if there is none; no other variable of the user leaks in."""
    return {"PATH": os.pathsep.join([*map(str, folders), SYSTEM_PATH]), "HOME": os.environ.get("HOME", "/root")}


def end(*, deadline_s: float = 20.0) -> None:
    """End all processes of the first node, and remove its link and the cgroups of pods; do nothing if there are none.

    Raises:
        CommandFailed: something is left at the deadline.
    """
    ends = time.monotonic() + deadline_s
    end_processes(MARK, deadline_s=deadline_s)
    if (Path("/sys/class/net") / MACHINE_LINK).exists():
        with contextlib.suppress(CommandFailed):  # it may go by itself in between
            run_quiet(["ip", "link", "delete", MACHINE_LINK], env=environment())
    remove_cgroups(leftover_cgroups, ends)


def end_processes(mark: str, *, deadline_s: float = 20.0) -> None:
    """Signal the first process of the node `mark` until it is gone, with SIGKILL in the second half of the deadline.

    It is pid 1 of its namespace, so the kernel ends every other process there. A survivor at the deadline raises CommandFailed.
    """
    ends = time.monotonic() + deadline_s
    number = signal.SIGTERM
    while (pid := first_process(mark)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if time.monotonic() > ends:
            raise CommandFailed(f"the node's first process {pid} does not end")
        time.sleep(0.1)
        number = signal.SIGKILL if ends - time.monotonic() < deadline_s / 2 else signal.SIGTERM


def leftover_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the existing cgroups `kubepods`, in which a kubelet has all its pods: one with cgroup v2, one for each controller with v1."""
    return cgroups_named("kubepods", root)


def cgroups_named(name: str, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    return [p for p in (root / name, *root.glob(f"*/{name}")) if p.is_dir()]


def make_cgroups(name: str, root: Path = Path("/sys/fs/cgroup")) -> None:
    """Create the group `name` at the root of cgroup v2, or of each v1 controller, for a kubelet that must not manage the whole machine.

    With v1 it inherits CPUs and memory nodes, because a new group there may use none.
    """
    trees = (
        [root] if (root / "cgroup.controllers").exists() else [tree for tree in root.iterdir() if tree.is_dir() and not tree.is_symlink()]
    )
    for tree in trees:
        (tree / name).mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # version 1 makes groups that may use nothing
            if (tree / file).exists() and not (tree / name / file).read_text().strip():
                (tree / name / file).write_text((tree / file).read_text())


def remove_cgroups(look: Callable[[], list[Path]], ends: float) -> None:
    """Delete groups until `look` returns none; raise CommandFailed for those that are still busy at `ends`, a time of `time.monotonic`."""
    while left := look():
        for tree in left:
            _remove_tree(tree)
        if time.monotonic() > ends:
            raise CommandFailed(f"cgroups with processes in them are left; is another kubelet running here? {[str(p) for p in left]}")
        time.sleep(0.05)


def _remove_tree(tree: Path) -> None:
    for folder, _, _ in os.walk(tree, topdown=False):
        with contextlib.suppress(OSError):  # still busy: the next round
            Path(folder).rmdir()


def run_inside(pid: int, argv: Sequence[str | Path], *, folders: Sequence[Path] = (), deadline_s: float = 60.0) -> str:
    """Run a short program in the namespaces of process `pid` and return its output; raise CommandFailed if it fails or takes too long."""
    return run_quiet([*entering(pid), *argv], env=environment(*folders), deadline_s=deadline_s)
