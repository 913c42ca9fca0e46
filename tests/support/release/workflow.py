# SPDX-License-Identifier: Apache-2.0
"""The workflows of .github, and their steps run here.

Real: the words of the steps, bash and what they call. Not real: the runner, so expressions in `${{ }}` are filled in by the test.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PUBLISH: list[dict[str, Any]] = WORKFLOWS["release"]["jobs"]["publish"]["steps"]
STEP_S = 500


def run_step(name: str, variables: Mapping[str, str], output: Path) -> dict[str, str]:
    """Execute the shell script of the release workflow's step `name` with bash at the repository root. Return what it wrote to
    GITHUB_OUTPUT, by key; a failing script raises."""
    (words,) = (step["run"] for step in PUBLISH if step.get("id") == name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "GITHUB_OUTPUT": str(output), **variables}
    subprocess.run(["bash", "-e", "-c", words], cwd=ROOT, env=environment, check=True, timeout=STEP_S)
    return dict(line.split("=", 1) for line in output.read_text().splitlines())
