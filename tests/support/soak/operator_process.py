# SPDX-License-Identifier: Apache-2.0
"""The operator as a process of its own: started, killed, and inspected by its metrics and its log."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from support.ports import unused_port
from support.soak.frame import metric_values, total
from support.worker.leftovers import footprint

TESTS = Path(__file__).resolve().parents[2]
# No input should cause these in the log.
COMPLAINT = re.compile(r"Traceback|is not understood|Unhandled|never retrieved|reconcile failed|\b(ERROR|CRITICAL)\b")


class OperatorProcess:
    """An operator that can be started again after each death, and writes to the same log.

    Real: its program and its ports. Not real: the wrappers of `support.operator.process`, which let it die at given places, and count.
    """

    def __init__(
        self,
        folder: Path,
        kubeconfig: Path,
        *,
        program: str = "support.operator.process",
        control_port: int | None = None,
        image: str = "worker:1",
        arguments: Sequence[str] = ("--all-namespaces",),
        key: str = "k" * 32,
        sources: Sequence[Path] = (TESTS,),
        strangers_s: float | None = None,
        **settings: float,
    ) -> None:
        """Prepare the command line. `image` is the default for workers, `arguments` come last, and `settings` have no option.

        `sources` come before this environment's own, so an operator of another version may be named. `strangers_s`: the seconds after which
        it looks again at another owner's object. None: the operator's default.
        """
        self.log, self._key_file, self.key = folder / "operator.log", folder / "key", key
        self.log.touch()
        self._key_file.write_text(key)
        self._command = [sys.executable, "-m", program, "run", f"--engine-image={image}", "--log-format=plain"]
        self._command += [*arguments, f"--operator-key-file={self._key_file}"]
        self._environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(map(str, sources))}
        self._under_test = {"controlPort": control_port, "settings": settings, "strangersS": strangers_s}

    def start(self, *, die_at: int | None = None, died_at: Path | None = None) -> None:
        """Start the process without waiting. With `die_at` it dies at the place of that number, counted from its start.

        With `died_at`, a file, it dies at each kind of place not in the file, and restarts.
        """
        metrics_port, liveness_port = unused_port(), unused_port()
        self._metrics_url, self._liveness_url = f"http://127.0.0.1:{metrics_port}/metrics", f"http://127.0.0.1:{liveness_port}/healthz"
        command = [*self._command, f"--metrics-port={metrics_port}", f"--liveness-port={liveness_port}"]
        given = self._under_test | {"dieAt": die_at, "diedAt": str(died_at) if died_at else None}
        document = json.dumps({name: value for name, value in given.items() if value is not None})
        environment = self._environment | {"OPERATOR_UNDER_TEST": document}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def pid(self) -> int:
        """The process id of the operator that runs now; another one after each restart."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process runs; it may have died where it was ordered to."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait up to 90 s until the liveness probe succeeds; AssertionError with the log after that, or when the program ends."""
        self.eventually(lambda: self.health() == 200, within_s=90.0)

    def eventually(self, look: Callable[[], Any], *, within_s: float = 40.0) -> Any:
        """Return the first true result of `look`, which may fail to connect before. AssertionError with the log after `within_s`, or at
        once when the program ends."""
        ends = time.monotonic() + within_s
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if found := look():
                    return found
            assert time.monotonic() < ends and self.is_alive(), self.log.read_text()[-4000:]
            time.sleep(0.1)

    def health(self) -> int:
        """Return the HTTP status of the liveness probe."""
        return httpx2.get(self._liveness_url, timeout=5).status_code

    def kill(self) -> None:
        """Send SIGKILL to the process, if it lives, and to its children, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)

    def stop(self) -> None:
        """Send SIGTERM and wait, as a kubelet does. After 25 s kill the process, and raise AssertionError."""
        self._process.terminate()
        try:
            self._process.wait(25)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the operator did not end within 25 s") from None

    def metrics(self) -> dict[str, float]:
        return metric_values(httpx2.get(self._metrics_url, timeout=10).text)

    def kept(self, namespace: str) -> list[str]:
        """List the entries that it keeps about objects of a namespace, as its metrics name them."""
        return [name for name in self.metrics() if name.startswith("under_test_kept") and f'namespace="{namespace}"' in name]

    def passes(self) -> int:
        """Return the number of passes over all objects in the present life."""
        return total(self.metrics(), "diffusion_operator_reconcile_seconds_count")

    def resident_bytes(self) -> int:
        return footprint(self)[self.pid][0]

    def descriptors(self) -> int:
        return footprint(self)[self.pid][1]

    def rotate(self, key: str) -> None:
        """Put a new key before the present one, restart, and wait until the operator is ready, as docs/security.md describes."""
        self._key_file.write_text(f"{key}\n{self.key}\n")
        self.key = key
        self.stop()
        self.start()
        self.wait_ready()

    def complaints(self) -> list[str]:
        """Return the log lines that show a bug whatever the input was: tracebacks, errors and the other patterns in COMPLAINT."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if COMPLAINT.search(line)]
