# SPDX-License-Identifier: Apache-2.0
"""A real API server and nothing behind it: etcd and kube-apiserver on loopback, ready in three seconds, for tests of CRDs and clients.

No kubelet, no controllers: pods stay Pending, nothing is garbage-collected, a deleted namespace stays Terminating. It needs no root and no
namespaces, and takes free ports and a folder of its own. So it runs beside a node and beside others of its kind.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import processes, programs
from .certs import Authority
from .errors import CommandFailed
from .paths import apiserver_state
from .processes import Process
from .progress import step

READY_DEADLINE_S = 60.0
ATTEMPTS = 3  # a free port may be taken by another between our look and etcd's
# Requests of service accounts, except those of Kubernetes itself; and grants and removals of rights by anybody.
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, delete, deletecollection]
  resources: [{group: rbac.authorization.k8s.io, resources: [rolebindings]}]
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"""
AUDIT_FILES_MB = 50  # there are two: the tests of a whole cluster write some


@contextmanager
def apiserver(*, audited: bool = False, admission: Sequence[str] = ()) -> Iterator[Path]:
    """Start an API server and its etcd in a temporary folder, and yield the path of its kubeconfig; both end with the block.

    If the calling thread ends first, the kernel kills them. With `audited`, requests are logged to `audit.log` beside the kubeconfig, a
    JSON object a line. `admission` adds plugins to those that are on by default.
    """
    with tempfile.TemporaryDirectory(prefix="devcluster-apiserver-") as folder:
        running = _start_somehow(Path(folder), dies_with_us=True, flags=_flags(Path(folder), admission, audited=audited))
        try:
            yield Path(folder) / "kubeconfig"
        finally:
            _stop(running)


def up() -> Path:
    """Start an API server that runs until `down`, or find the one of an earlier call; return the path of its kubeconfig.

    If only a part of an earlier one lives, that is ended first.
    """
    folder = apiserver_state()
    if _running(folder):
        return folder / "kubeconfig"
    down()
    folder.mkdir(parents=True, mode=0o700)
    _start_somehow(folder, dies_with_us=False, flags=[])
    return folder / "kubeconfig"


def down() -> None:
    """End the processes that `up` left running, and remove their folder; do nothing if there are none."""
    folder = apiserver_state()
    _stop(processes.load(folder / "processes.json"))
    shutil.rmtree(folder, ignore_errors=True)


def _running(folder: Path) -> bool:
    noted = processes.load(folder / "processes.json")
    return bool(noted) and all(p.alive() for p in noted) and (folder / "kubeconfig").exists()


def _flags(folder: Path, admission: Sequence[str], *, audited: bool) -> list[str]:
    flags = [f"--enable-admission-plugins={','.join(admission)}"] if admission else []
    if audited:
        policy = folder / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        flags += audit_flags(policy, folder / "audit.log")
    return flags


def audit_flags(policy: Path, log: Path) -> list[str]:
    """Return flags of kube-apiserver for a log of requests at `log`, in at most two files of AUDIT_FILES_MB.

    Nothing is written: the caller writes AUDIT_POLICY to `policy`.
    """
    bounds = [f"--audit-log-maxsize={AUDIT_FILES_MB}", "--audit-log-maxbackup=1"]
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}", *bounds]


def _start_somehow(folder: Path, *, dies_with_us: bool, flags: Sequence[str]) -> list[Process]:
    for attempt in range(1, ATTEMPTS + 1):
        running: list[Process] = []
        try:
            _start(folder, running, dies_with_us=dies_with_us, flags=flags)
        except CommandFailed:
            _stop(running)
            if attempt == ATTEMPTS:
                raise
        except BaseException:
            _stop(running)
            raise
        else:
            return running
        shutil.rmtree(folder / "etcd", ignore_errors=True)
    raise AssertionError("unreachable")


def _start(folder: Path, running: list[Process], *, dies_with_us: bool, flags: Sequence[str]) -> None:
    client_port, peer_port, api_port = _free_ports(3)
    binaries, etcd_binary = programs.kube(), programs.etcd()
    authority = Authority(folder / "certs")
    authority.service_account_key()
    authority.issue("apiserver", user="kube-apiserver", group="kube", addresses=("DNS:localhost", "IP:127.0.0.1"))
    authority.issue("admin", user="admin", group="system:masters")
    etcd_url, peer_url, server = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}", f"https://127.0.0.1:{api_port}"
    for name, argv in (
        ("etcd", _etcd_command(etcd_binary, folder / "etcd", etcd_url, peer_url)),
        ("kube-apiserver", [*_command(binaries, authority, etcd_url, api_port), *flags]),
    ):
        running.append(processes.start(name, argv, log=folder / f"{name}.log", dies_with_us=dies_with_us))
        processes.save(running, folder / "processes.json")
    with step("API server"):
        _wait_ready(server, authority, running, folder)
    authority.kubeconfig("admin", server=server, target=folder / "kubeconfig")


def _etcd_command(binary: Path, data: Path, client_url: str, peer_url: str) -> list[str | Path]:
    """Return the command of etcd for a single member that syncs nothing to the disk, which saves a third of the start-up time.

    Data may be lost when the machine loses power.
    """
    urls = ["--listen-client-urls", client_url, "--advertise-client-urls", client_url, "--listen-peer-urls", peer_url]
    member = ["--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}"]
    return [binary, "--data-dir", data, *urls, *member, "--unsafe-no-fsync"]


def _command(binaries: Path, authority: Authority, etcd_url: str, port: int) -> list[str | Path]:
    return [
        binaries / "kube-apiserver",
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # The address in the `kubernetes` Service would have to be one that is not loopback.
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={authority.file('apiserver.crt')}",
        f"--tls-private-key-file={authority.file('apiserver.key')}",
        f"--client-ca-file={authority.file('ca.crt')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={authority.file('sa.pub')}",
        f"--service-account-signing-key-file={authority.file('sa.key')}",
        "--service-cluster-ip-range=10.0.0.0/16",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        # It waits for a controller that would make each namespace's account; without one no pod could be created.
        "--disable-admission-plugins=ServiceAccount",
    ]


def _wait_ready(server: str, authority: Authority, running: list[Process], logs: Path, *, deadline_s: float = READY_DEADLINE_S) -> None:
    """Wait until the API server answers /readyz, asked with the authority's admin certificate.

    Raises:
        CommandFailed: a process in `running` ended, or `deadline_s` is over; with the end of a log from `logs`.
    """
    context = ssl.create_default_context(cafile=str(authority.file("ca.crt")))
    context.load_cert_chain(str(authority.file("admin.crt")), str(authority.file("admin.key")))
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        for process in running:
            if not process.alive():
                raise CommandFailed(
                    f"{process.name} ended while it was starting; the end of its log:\n{_tail(logs / f'{process.name}.log')}"
                )
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{server}/readyz", context=context, timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.05)
    raise CommandFailed(f"the API server was not ready after {deadline_s:.0f} s; the end of its log:\n{_tail(logs / 'kube-apiserver.log')}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else "(no log)"


def _stop(running: list[Process]) -> None:
    for process in reversed(running):
        process.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
