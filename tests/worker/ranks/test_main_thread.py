# SPDX-License-Identifier: Apache-2.0
"""Signs of a process's main thread, read by another: its points, and its stack while it holds the GIL."""

import subprocess
import sys
import time
from pathlib import Path

from diffusion_worker.main_thread import SIGNAL, OwnMainThread, SeenMainThread, stage_of

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/venv/diffusion_worker/ranks/output.py", line 50 in run

Thread 0x00007f00 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2800 in all_reduce
  File "/venv/diffusion_worker/runner/parallel/rows.py", line 146 in agree
  File "/venv/diffusion_worker/ranks/worker_proc.py", line 193 in _tick
"""

# A regular expression that holds the GIL for hours.
HOLDS_THE_GIL = """
import re, sys
from pathlib import Path
from diffusion_worker.main_thread import OWN

def stuck():
    re.match(r"(a+)+$", "a" * 60 + "b")

OWN.show(Path(sys.argv[1]), 3)
OWN.passed()
OWN.passed()
print("going", flush=True)
stuck()
"""


def test_the_stage_is_the_innermost_frame_of_the_main_thread_and_the_innermost_of_the_worker() -> None:
    assert stage_of(DUMP) == "all_reduce (distributed_c10d.py:2800), called by agree (rows.py:146)"
    own = 'Thread 0x1 (most recent call first):\n  File "/venv/diffusion_worker/ranks/worker_proc.py", line 193 in _tick\n'
    assert stage_of(own) == "_tick (worker_proc.py:193)"
    assert stage_of("") is None


def test_a_process_that_holds_the_gil_is_seen_by_its_points_and_its_stack(tmp_path: Path) -> None:
    seen = SeenMainThread(tmp_path, 3)
    assert (seen.passed.points, seen.stack()) == (0, "")
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_GIL, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"going\n"
            assert seen.passed.points == 2
            assert 0 <= time.monotonic() - seen.passed.at_s < 60
            deadline = time.monotonic() + 30
            # The first signal may come before it is stuck.
            while "stuck" not in (stage_of(seen.stack()) or "") + seen.stack() and time.monotonic() < deadline:
                process.send_signal(SIGNAL)
                time.sleep(0.05)
            assert "in stuck" in seen.stack()
            assert process.poll() is None
        finally:
            process.kill()
    seen.close()
    assert seen.stack() == ""


def test_a_process_that_shows_nothing_counts_nothing() -> None:
    OwnMainThread().passed()
