# SPDX-License-Identifier: Apache-2.0
"""A worker's server process of a benchmark, and what it and the kernel say of it."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
LISTENING = re.compile(rb"listening data=\S+:(\d+) control=\S+:(\d+)")


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a server during the block, and yield its process and data port; the rest is as with `listening`."""
    with listening(command) as (process, port, _):
        yield process, port


@contextlib.contextmanager
def listening(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Run a server during the block, and yield its process, data port and control port once it has printed where it listens.

    At the block's end it is terminated, and killed if that takes over 30 seconds.

    Raises:
        RuntimeError: it does not listen in time. This error and one of the block get the end of its log.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            yield process, *_ports(process, output.fileno())
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the end of its log:\n{_tail(output.fileno())}") from error
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _ports(process: subprocess.Popen[bytes], output: int) -> tuple[int, int]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = LISTENING.search(os.pread(output, 65_536, 0))
        if found:
            return int(found[1]), int(found[2])
        time.sleep(0.002)
    raise RuntimeError("the server does not listen")


def _tail(output: int) -> str:
    return os.pread(output, 1 << 20, 0)[-1000:].decode(errors="replace")


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server is ready; raise RuntimeError if it ends or is not ready in time."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server is not ready within {DEADLINE_S:g} s")


def make_image(port: int) -> None:
    """Request an image with two denoising steps, and return once the whole response has arrived.

    Raises urllib's HTTPError for an error status.
    """
    body = json.dumps({"prompt": "a red digit seven", "num_inference_steps": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/images/generations", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read()


def state(control_port: int) -> dict[str, Any]:
    """Return the state document of a server without a control token."""
    with urllib.request.urlopen(f"http://127.0.0.1:{control_port}/v1/state", timeout=DEADLINE_S) as answer:
        return dict(json.load(answer))


def status_mb(pid: int, field: str) -> float:
    """Read a memory field of a live process from the kernel, for instance `VmRSS` or `VmHWM`, in units of 1024 kB.

    Raises:
        RuntimeError: the kernel lists no such field for the process.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/status has no {field}")
    return int(found[1]) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a live process, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
