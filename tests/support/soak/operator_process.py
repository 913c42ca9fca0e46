# SPDX-License-Identifier: Apache-2.0
"""The operator as a process of its own: started, killed, looked into by its metrics and its log."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.operator.real_apiserver import CRDS, kubectl

TESTS = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 30.0


@contextmanager
def own_apiserver() -> Iterator[Path]:
    """A real one with our CRDs and with no object of anybody else's; gives its kubeconfig."""
    from tools.devcluster.apiserver import apiserver

    with apiserver() as kubeconfig:
        for path in CRDS:
            kubectl(kubeconfig, "apply", "--server-side", "-f", str(path))
        kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        yield kubeconfig


class OperatorProcess:
    """One at a time; all of its lives write to one log."""

    def __init__(
        self,
        folder: Path,
        kubeconfig: Path,
        *,
        control_port: int | None = None,
        image: str = "worker:1",
        arguments: Sequence[str] = (),
        **settings: float,
    ) -> None:
        """`image`: the default for workers; `arguments`: more of the command line; `settings`: values that have no option."""
        self._arguments = tuple(arguments)
        self._folder = folder
        self._kubeconfig = kubeconfig
        self._control_port = control_port
        self._image = image
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._metrics_port = self._liveness_port = 0
        self.log = folder / "operator.log"
        self.log.touch()
        self.key = "k" * 32
        (folder / "key").write_text(self.key)

    def start(self, *, die_at: int | None = None, died_at: Path | None = None) -> None:
        """Watching every namespace. Does not wait; `wait_ready` does.

        With `died_at`, a file, it dies at each kind of place that is not in it, and lives again.
        """
        self._metrics_port, self._liveness_port = _free_port(), _free_port()
        told = {"dieAt": die_at, "controlPort": self._control_port, "settings": self._settings}
        told |= {"diedAt": str(died_at)} if died_at is not None else {}
        command = [
            *(sys.executable, "-m", "support.operator.process", "run", f"--engine-image={self._image}", "--all-namespaces"),
            *(f"--operator-key-file={self._folder / 'key'}", f"--metrics-port={self._metrics_port}"),
            *(f"--liveness-port={self._liveness_port}", "--log-format=plain"),
            *self._arguments,
        ]
        told = {name: value for name, value in told.items() if value is not None}
        environment = os.environ | {"KUBECONFIG": str(self._kubeconfig), "PYTHONPATH": str(TESTS), "OPERATOR_UNDER_TEST": json.dumps(told)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def pid(self) -> int:
        """Of its present life."""
        assert self._process is not None
        return self._process.pid

    def is_alive(self) -> bool:
        """It may have died where it was told to."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self) -> None:
        """Until it answers its probe; it must not end meanwhile."""
        ends = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < ends:
            if not self.is_alive():
                raise AssertionError(f"the operator ended while it was starting:\n{self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._liveness_port}/healthz", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the operator was not ready within {READY_WITHIN_S:g} s")

    def health(self) -> int:
        """The status of its liveness probe."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._liveness_port}/healthz", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def kill(self) -> None:
        """With SIGKILL, if it lives, and what it forked."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def stop(self) -> None:
        """As a kubelet would."""
        if self._process is not None and self.is_alive():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(25)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError("the operator did not end within 25 s") from None

    def metrics(self) -> dict[str, float]:
        """Every line, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def passes(self) -> int:
        """Over all objects of its present life."""
        return int(sum(value for name, value in self.metrics().items() if name.startswith("diffusion_operator_reconcile_seconds_count")))

    def resident_bytes(self) -> int:
        """As the kernel counts it."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def descriptors(self) -> int:
        """Open ones: files and sockets."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rotate(self, key: str) -> None:
        """A new key before the one that it has, and a start again: what the page on security says."""
        (self._folder / "key").write_text(f"{key}\n{self.key}\n")
        self.key = key
        self.stop()
        self.start()
        self.wait_ready()

    def complaints(self) -> list[str]:
        """Lines of the log that no input should cause."""
        text = self.log.read_text(errors="replace")
        bad = ("Traceback", "is not understood", "Unhandled", "never retrieved", "reconcile failed")
        return [line for line in text.splitlines() if any(word in line for word in bad) or re.search(r"\b(ERROR|CRITICAL)\b", line)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
