# SPDX-License-Identifier: Apache-2.0
"""A local address for a Service, the same way on every provider: `kubectl port-forward`, started again when its pod goes away."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .cluster import provider
from .errors import CommandFailed

FIRST_DEADLINE_S = 30.0
PAUSE_S = 0.3  # between two attempts, while no pod of the Service is there


@contextmanager
def connect(namespace: str, service: str, port: int | str) -> Iterator[str]:
    """Yield `http://127.0.0.1:PORT`, which leads to the Service during the block; raise CommandFailed if it does not within 30 seconds.

    All connections go to one pod of the Service. When that pod ends, open connections break, and the same local port soon leads to another.
    """
    forward = _Forward(namespace, service, str(port))
    keeper = threading.Thread(target=forward.keep, daemon=True)
    keeper.start()
    try:
        yield forward.first_url()
    finally:
        forward.end()
        keeper.join()


class _Forward:
    def __init__(self, namespace: str, service: str, port: str) -> None:
        where = provider()
        self._base = [str(where.kubectl()), "--kubeconfig", str(where.kubeconfig()), "port-forward", "--namespace", namespace]
        self._service, self._port, self._local_port = service, port, ""
        self._first: queue.Queue[str] = queue.Queue()
        self._ended = threading.Event()
        self._kubectl: subprocess.Popen[str] | None = None
        self._said = ""

    def first_url(self) -> str:
        try:
            return self._first.get(timeout=FIRST_DEADLINE_S)
        except queue.Empty:
            said = self._said or "kubectl says nothing"
            raise CommandFailed(f"no way to the Service {self._service} after {FIRST_DEADLINE_S:.0f} s: {said}") from None

    def keep(self) -> None:
        while not self._ended.is_set():
            self._run_once()
            self._ended.wait(PAUSE_S)

    def end(self) -> None:
        self._ended.set()
        if self._kubectl is not None:
            self._kubectl.terminate()

    def _run_once(self) -> None:
        words = [*self._base, f"service/{self._service}", f"{self._local_port}:{self._port}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as self._kubectl:
            if self._ended.is_set():
                self._kubectl.terminate()
            assert self._kubectl.stdout is not None
            for line in self._kubectl.stdout:
                self._said = line.strip()
                match = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
                if match:
                    self._local_port = match[1]
                    self._first.put(f"http://127.0.0.1:{match[1]}")
