# SPDX-License-Identifier: Apache-2.0
"""The operator raises its limit of open files at the start; a limit that is too low is an error that names the expected one."""

import logging
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from diffusion_operator.__main__ import workers_within
from diffusion_operator.errors import SettingsError

PROGRAM = """
import resource
from diffusion_operator.__main__ import raise_limit
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run_with(soft: int, hard: int, program: Sequence[str] = ("-c", PROGRAM)) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run([sys.executable, *program], preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    assert run_with(256, 1024).stdout.split() == ["1024", "1024"]


def test_a_limit_that_is_enough_for_hardly_any_worker_ends_the_program() -> None:
    with pytest.raises(SettingsError, match=r"RLIMIT_NOFILE\) is 200, expected at least 256"):
        workers_within(200)


def test_the_operator_itself_looks_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 32)
    options = ["--engine-image=i", f"--operator-key-file={tmp_path / 'key'}", "--namespace=a"]
    ended = run_with(200, 200, program=["-m", "diffusion_operator", "run", *options])
    assert ended.returncode == 2
    assert "RLIMIT_NOFILE) is 200, expected at least 256" in ended.stderr


def test_a_limit_for_few_workers_is_said_and_one_for_many_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert workers_within(1024) == 448
        assert workers_within(1 << 20) > 2000
    assert [record.getMessage() for record in caplog.records if "enough for 448 workers" in record.getMessage()]
    assert len(caplog.records) == 1
