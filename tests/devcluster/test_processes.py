# SPDX-License-Identifier: Apache-2.0
"""Real processes end for certain, and are found again by a later run."""

import os
import sys
from pathlib import Path

import pytest

from tools.devcluster import processes


def test_a_process_is_found_again_by_its_note_and_ended(tmp_path: Path) -> None:
    process = processes.start("sleeper", ["sleep", "600"], log=tmp_path / "log")
    processes.save([process], tmp_path / "note")
    (found,) = processes.load(tmp_path / "note")
    assert found.alive()
    found.stop()
    assert not found.alive()


def test_a_process_keeps_nothing_open_that_our_caller_left_open_to_us(tmp_path: Path) -> None:
    """Start a process while an inheritable pipe is open: the pipe has to end once this side is closed.

    A caller's lock, such as that of `flock`, would otherwise stay taken.
    """
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    process = processes.start("sleeper", ["sleep", "600"], log=tmp_path / "log")
    os.close(writing)
    try:
        os.set_blocking(reading, False)
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert process.alive()
        assert os.read(reading, 1) == b"", "the other end is closed everywhere"
    finally:
        process.stop()
        os.close(reading)


def test_a_process_that_does_not_listen_is_ended_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    process = processes.start("deaf", [sys.executable, "-c", deaf], log=tmp_path / "log")
    while "deaf" not in (tmp_path / "log").read_text():
        assert process.alive()
    process.stop()
    assert not process.alive()


def test_another_process_with_the_same_pid_is_left_alone() -> None:
    stranger = processes.Process("ours-once", os.getpid(), started_ticks=1)
    assert not stranger.alive()
    stranger.stop()


@pytest.mark.parametrize("text", ["", "[{", '[{"name": "half"}]'])
def test_half_a_note_of_a_killed_run_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert processes.load(tmp_path / "note") == []
    assert processes.load(tmp_path / "nowhere") == []
