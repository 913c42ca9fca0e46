# SPDX-License-Identifier: Apache-2.0
"""The program can be ended before it has imported anything."""

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from diffusion_operator.program import main; main()"
DEADLINE_S = 30.0


def catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_sigterm_while_it_imports_ends_it_at_once_with_the_code_of_the_signal() -> None:
    """Send SIGTERM while the program imports, and check its exit code.

    Without a handler it would ignore the signal as a container's first process, and die by it elsewhere, with another code.
    """
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + DEADLINE_S
        while not catches_sigterm(process.pid) and time.monotonic() < until:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_it_is_the_command_line_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"diffusion-operator": "diffusion_operator.program:main"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, "keeps DiffusionDeployments and LoRAAdapters" in done.stdout) == (0, True)
