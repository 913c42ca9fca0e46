# SPDX-License-Identifier: Apache-2.0
"""The operator's program, or another one, beside an API server of a benchmark: its process, and what it says of itself."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from benchmarks.operators.children import IMAGE, KEY, OPERATOR_PODS

ROOT = Path(__file__).parents[2]
LEASE_NAME = "operator"
KUBECONFIG = "kubeconfig"
"""In the folder of a program."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""The operator's image has the same."""
START_DEADLINE_S = 600.0
LISTED = "diffusion_operator_queue_length"
LEADS = re.compile(r"^diffusion_operator_leader 1", re.MULTILINE)
PASSES = re.compile(r'^diffusion_operator_reconcile_seconds_count\{kind="DiffusionDeployment",outcome="ok"\} (\S+)$', re.MULTILINE)
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
TICKS = os.sysconf("SC_CLK_TCK")


class OperatorRun:
    """A running process of the operator, with its memory and processor time by the kernel and its own metrics.

    It is made of a process that is started already, and does not end it.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self._port = port

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/metrics"

    @property
    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_MB

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the process by SIGSTOP during the block, and let it go on afterwards."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the operator's process with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Suspend the process by SIGSTOP, and return at once; nothing here lets it go on, so it has to be killed later."""
        self._process.send_signal(signal.SIGSTOP)

    async def leads(self) -> bool:
        """Return true if its metrics say that it is the leader; false also if it does not answer."""
        with contextlib.suppress(OSError):
            return LEADS.search(await asyncio.to_thread(_get, f"http://127.0.0.1:{self._port}/metrics")) is not None
        return False

    async def passes(self, objects: int) -> None:
        """Wait until it has listed its objects and done at least so many passes over deployments.

        After a start each of them is over another deployment.

        Raises:
            RuntimeError: it ended, or has not done so many within two minutes.
        """
        ends = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise RuntimeError(f"the operator ended with status {self._process.returncode}")
            with contextlib.suppress(OSError):
                text = await asyncio.to_thread(_get, self.metrics_url)
                found = PASSES.search(text)
                if LISTED in text and (float(found[1]) if found is not None else 0.0) >= objects:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the operator did not look at {objects} objects in {START_DEADLINE_S:g} s")


@contextlib.asynccontextmanager
async def operator(folder: Path, namespace: str, *, identity: str | None = None) -> AsyncIterator[OperatorRun]:
    """Run the operator's program during the block, for one namespace of the API server; its kubeconfig, key and log are in `folder`.

    With an `identity` it takes part in an election, by a Lease in that namespace.
    """
    key = folder / "key"
    key.write_bytes(KEY)
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, liveness = free.getsockname()[1], other.getsockname()[1]
    argv = [
        sys.executable,
        "-m",
        "diffusion_operator",
        "run",
        f"--namespace={namespace}",
        f"--engine-image={IMAGE}",
        f"--operator-key-file={key}",
    ]
    labels = [f"--operator-label={name}={value}" for name, value in OPERATOR_PODS.labels.items()]
    argv += [f"--operator-namespace={OPERATOR_PODS.namespace}", *labels, f"--metrics-port={port}", f"--liveness-port={liveness}"]
    if identity is not None:
        argv += [f"--lease-namespace={namespace}", f"--lease-name={LEASE_NAME}", f"--identity={identity}"]
    async with running(argv, folder / "operator.log") as process:
        yield OperatorRun(process, port)


@contextlib.asynccontextmanager
async def running(argv: list[str], log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a program during the block, with the kubeconfig beside its log, and yield its process; output is added to the log.

    At the end it gets SIGTERM, and SIGKILL after 20 seconds. A RuntimeError of the block gets the end of the log.
    """
    environment = os.environ | MALLOC | {"PYTHONPATH": ".", "KUBECONFIG": str(log.with_name(KUBECONFIG))}
    with log.open("ab") as output, subprocess.Popen(argv, stdout=output, stderr=output, cwd=ROOT, env=environment) as process:  # noqa: ASYNC220
        try:
            yield process
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the end of {argv[2]}'s log:\n{_tail(log)}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 20)
            process.kill()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-10:])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
    return text
