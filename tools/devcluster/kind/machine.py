# SPDX-License-Identifier: Apache-2.0
"""Record what the engine and the kubelets in its containers change of this machine, and put it back.

The record is written once, before anything is changed, and stays until everything is back: a later one would record the changes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

from ..errors import CommandFailed
from ..paths import KIND_STATE, cache_dir
from ..progress import run_quiet
from . import namespace

RECORD = KIND_STATE / "machine.json"
LINK = "devcluster1"
"""The machine's end of the cable to the engine."""
CGROUP = "docker"
"""Docker's group of every controller, in which the containers' groups are."""
# A kubelet writes these, for the whole machine.
_SYSCTLS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_MODULES = Path("/lib/modules")
"""A folder that kind mounts, so Docker makes it."""


@dataclass(frozen=True)
class Machine:
    """A part of the machine's state: the sysctls, control groups, links and mounts that the engine and its kubelets change."""

    sysctls: dict[str, str]
    cgroups: list[str]
    links: list[str]
    mounts: list[str]
    modules_folder: bool


def data_root() -> Path:
    """Return the folder of Docker's images and containers, which `down --purge` removes with the cache."""
    return cache_dir() / "docker"


def observe() -> Machine:
    """Return the present state of all that the engine and its kubelets may change on this machine."""
    return Machine(
        sysctls={name: (Path("/proc/sys") / name).read_text().strip() for name in _SYSCTLS},
        cgroups=sorted(map(str, namespace.cgroups_named(CGROUP))),
        links=sorted(folder.name for folder in Path("/sys/class/net").iterdir() if folder.name == LINK),
        mounts=sorted(mount for mount in _mounts() if _is_engines(mount)),
        modules_folder=_MODULES.exists(),
    )


def record() -> None:
    """Save the machine's state to RECORD, for `restore`. If RECORD exists, keep it: it dates from before the changes still to be undone."""
    if RECORD.exists():
        return
    KIND_STATE.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = RECORD.with_suffix(".draft")
    draft.write_text(dumps(asdict(observe())))
    draft.rename(RECORD)


def restore(*, deadline_s: float = 30.0) -> None:
    """Undo all changes since `record`, then delete RECORD; do nothing if it does not exist. The caller has ended the engine's processes.

    Raises:
        CommandFailed: the machine still differs from RECORD after `deadline_s` seconds; RECORD is kept.
    """
    if not RECORD.exists():
        return
    before = Machine(**loads(RECORD.read_text()))
    now = observe()
    for name, value in before.sysctls.items():
        if now.sysctls[name] != value:
            (Path("/proc/sys") / name).write_text(value)
    for mount in sorted(set(now.mounts) - set(before.mounts), reverse=True):
        run_quiet(["umount", "--lazy", mount])
    for link in set(now.links) - set(before.links):
        with contextlib.suppress(CommandFailed):  # it goes with its other end, perhaps just now
            run_quiet(["ip", "link", "delete", link], env=namespace.environment())
    ends = time.monotonic() + deadline_s
    namespace.remove_cgroups(lambda: [p for p in namespace.cgroups_named(CGROUP) if str(p) not in before.cgroups], ends)
    if not before.modules_folder and _MODULES.exists():
        _MODULES.rmdir()
    _wait_same(before, ends)
    RECORD.unlink()


def _wait_same(before: Machine, ends: float) -> None:
    # The kernel takes down a network namespace, and with it our link, some time after its last process.
    while (now := observe()) != before:
        if time.monotonic() > ends:
            raise CommandFailed(f"the machine is not as before kind's engine: expected {before}, found {now}")
        time.sleep(0.05)


def _mounts() -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


def _is_engines(mount: str) -> bool:
    return any(Path(mount).is_relative_to(folder) for folder in (data_root(), KIND_STATE))
