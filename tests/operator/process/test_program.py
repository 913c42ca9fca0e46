# SPDX-License-Identifier: Apache-2.0
"""The program can be ended before it has imported anything."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

from support.early_sigterm import DEADLINE_S, exit_code_of, exit_code_of_caught_end

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from diffusion_operator.program import main; main()"


def test_a_sigterm_while_it_imports_ends_it_at_once_with_the_code_of_the_signal() -> None:
    """Without a handler the program would die by the signal here, with another code."""
    assert exit_code_of(PROGRAM, "run") == 128 + signal.SIGTERM


def test_a_sigterm_within_a_librarys_except_ends_it_as_well() -> None:
    assert exit_code_of_caught_end("diffusion_operator", "__main__") == 128 + signal.SIGTERM


def test_it_is_the_command_line_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"diffusion-operator": "diffusion_operator.program:main"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, "Reconcile DiffusionDeployments and LoRAAdapters" in done.stdout) == (0, True)
