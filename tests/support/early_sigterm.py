# SPDX-License-Identifier: Apache-2.0
"""A program that is sent SIGTERM while it imports. Without a handler a container's first process would ignore the signal.

Real: the process, its imports and the signal.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

DEADLINE_S = 120.0


def exit_code_of(program: str, *arguments: str) -> int:
    """Run a program, as Python code with arguments, send it SIGTERM as soon as it has a handler for it, and return its exit code."""
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + DEADLINE_S
        while not _catches_sigterm(process.pid) and time.monotonic() < until:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)


def exit_code_of_caught_end(package: str, command_line: str) -> int:
    """Run the program of a package, send it SIGTERM where its command line catches every exception, and return its exit code.

    The code is 0 if the signal was lost. Fake: the command line, a module that does nothing else; real: the program and its handler.
    """
    lines = (
        "import os, signal, sys, types",
        "def caught():",
        "    try: os.kill(os.getpid(), signal.SIGTERM)",
        "    except BaseException: pass",
        f"sys.modules['{package}.{command_line}'] = types.SimpleNamespace(main=caught)",
        f"from {package}.program import main",
        "main()",
    )
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=DEADLINE_S, check=False).returncode


def _catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)
