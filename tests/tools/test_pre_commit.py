# SPDX-License-Identifier: Apache-2.0
"""The hooks of pre-commit: the quick part of `make lint`, by the same programs; they refuse a commit that breaks it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".pre-commit-config.yaml"
# This hook reads the whole repository, which the folder of this test lacks.
WHOLE = "rooms"


def test_each_hook_is_a_line_of_make_lint() -> None:
    [local] = yaml.safe_load(CONFIG.read_text())["repos"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0].replace("$(PY)", ".venv/bin/python")
    lines = lint.replace(".venv/bin/python -m ruff", ".venv/bin/ruff")
    assert [hook["entry"] for hook in local["hooks"] if hook["entry"].removesuffix(" --force-exclude") not in lines] == []


@pytest.mark.slow
def test_a_line_that_ruff_refuses_is_not_committed(tmp_path: Path) -> None:
    shutil.copy(CONFIG, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "ruff").symlink_to(Path(sys.executable).parent / "ruff")
    (tmp_path / "bad.py").write_text("import os\n")
    env = {**os.environ, "SKIP": WHOLE, "PRE_COMMIT_HOME": str(tmp_path / "cache"), "GIT_CONFIG_GLOBAL": os.devnull}
    for command in (["git", "init", "-q"], ["git", "add", "bad.py", CONFIG.name]):
        subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=60)
    run = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 1
    assert "`os` imported but unused" in run.stdout
