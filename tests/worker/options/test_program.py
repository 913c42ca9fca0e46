# SPDX-License-Identifier: Apache-2.0
"""The program can be ended before it has imported anything."""

import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = "from diffusion_worker.program import main; main()"
DEADLINE_S = 30.0


def catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_sigterm_while_it_imports_ends_it_at_once_with_the_code_of_the_signal() -> None:
    """Send SIGTERM as soon as the program has a handler for it, while it still imports; the exit code must be 143.

    Without a handler a container's first process would ignore the signal.
    """
    command = [sys.executable, "-c", PROGRAM, "serve", "--model=/does-not-matter"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + DEADLINE_S
        while not catches_sigterm(process.pid) and time.monotonic() < until:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_it_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "--version"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, "version" in done.stdout) == (0, True)
