# SPDX-License-Identifier: Apache-2.0
"""Two of the operator's processes on one API server with an audit log, as the two pods of a release.

Real: the API server, its audit log, both processes, each with an account of its own. Not real: their pods, which are names alone.
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from support.apiserver.real_apiserver import kubectl
from support.apiserver.stalling_proxy import StallingProxy
from support.soak.operator_process import OperatorProcess

LEASE = ("operators", "release")
WRITES = {"create", "update", "patch", "delete"}


class Member:
    """An operator of the pair: its process, and the proxy through which it reaches the API server."""

    def __init__(self, folder: Path, kubeconfig: Path, name: str, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.name = name
        self.proxy = StallingProxy(kubeconfig)
        self.process = OperatorProcess(folder, self.proxy.kubeconfig(folder), arguments=arguments(name), **options)

    @property
    def leads(self) -> bool:
        return self.process.metrics()["diffusion_operator_leader"] == 1

    def stop(self) -> None:
        """Stop the process by SIGSTOP, so that it cannot notice the pause."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


class TwoOperators:
    """A pair of running operators, of which `leader` leads; a context manager."""

    def __init__(self, folder: Path, kubeconfig: Path, **options: Any) -> None:
        self._kubeconfig = kubeconfig
        make_lease(kubeconfig)
        self.leader, self.follower = (Member(folder / name, account(kubeconfig, name), name, **options) for name in ("one", "two"))

    def __enter__(self) -> Self:
        for one in (self.leader, self.follower):
            one.proxy.__enter__()
            one.process.start()
            one.process.wait_ready()
        self.leader.process.eventually(lambda: self.leader.leads)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.leader, self.follower):
            one.proxy.__exit__()
            one.process.kill()

    async def changed(self, within_s: float) -> None:
        """Wait until the follower leads, and swap `leader` and `follower`."""
        await asyncio.to_thread(self.follower.process.eventually, lambda: self.follower.leads, within_s=within_s)
        self.leader, self.follower = self.follower, self.leader

    def writers(self) -> list[str]:
        """Return the writers' names in order, each as often as it took over from the other one. Leases are left out."""
        return [name for name, _ in itertools.groupby(writers(self._kubeconfig))]


def arguments(identity: str) -> tuple[str, ...]:
    """Return the part of the command line that makes a process a member of the release."""
    return ("--all-namespaces", f"--lease-namespace={LEASE[0]}", f"--lease-name={LEASE[1]}", f"--identity={identity}")


def make_lease(kubeconfig: Path) -> None:
    """Create the namespace and a Lease that nobody holds, so that the first process leads at once."""
    documents = (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASE[0]}},
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"namespace": LEASE[0], "name": LEASE[1]}, "spec": {}},
    )
    for one in documents:
        kubectl(kubeconfig, "apply", "-f", "-", stdin=json.dumps(one))


def account(kubeconfig: Path, name: str) -> Path:
    """Create an account that may do everything, under its own name in the audit log; return its kubeconfig."""
    binding = f"{LEASE[0]}-{name}"
    kubectl(kubeconfig, "create", "serviceaccount", name, "--namespace", LEASE[0])
    kubectl(kubeconfig, "create", "clusterrolebinding", binding, "--clusterrole=cluster-admin", f"--serviceaccount={LEASE[0]}:{name}")
    content = json.loads(kubeconfig.read_text())
    content["users"][0]["user"] = {"token": kubectl(kubeconfig, "create", "token", name, "--namespace", LEASE[0]).strip()}
    made = kubeconfig.with_name(f"{name}-kubeconfig")
    made.write_text(json.dumps(content))
    return made


def writers(kubeconfig: Path) -> Iterator[str]:
    """Yield the account of each write that the API server did for an operator, oldest first. Leases are left out."""
    entries = [json.loads(line) for line in kubeconfig.with_name("audit.log").read_text().splitlines()]
    done = [
        one
        for one in entries
        if one["verb"] in WRITES and one["objectRef"]["resource"] != "leases" and one.get("responseStatus", {}).get("code", 0) < 300
    ]
    for one in sorted(done, key=lambda entry: str(entry["requestReceivedTimestamp"])):
        namespace, _, name = one["user"]["username"].removeprefix("system:serviceaccount:").partition(":")
        if namespace == LEASE[0]:
            yield name
