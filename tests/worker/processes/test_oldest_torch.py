# SPDX-License-Identifier: Apache-2.0
"""A worker on the oldest torch that `worker/pyproject.toml` allows loads, makes images with and without an adapter, sleeps and wakes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from support.runner import digit_judge
from support.sample import WHOLE
from support.syntax import names_of_torch
from support.worker.process import DIGITS, WorkerProcess
from tools import oldest_torch

pytestmark = [
    *(pytest.mark.slow, pytest.mark.timeout(1200)),
    pytest.mark.skipif(not WHOLE, reason="`make soak` runs it, since another torch is downloaded"),
]

STRIPES = DIGITS / "loras" / "stripes"
ASKED = {"prompt": "a red digit seven", "seed": 1}
# Prints the names, of those in its arguments, that torch has not.
MISSING = """
import pkgutil, sys
def missing(name):
    try:
        return pkgutil.resolve_name(name) is None
    except (AttributeError, ImportError):
        return True
print([name for name in sys.argv[1:] if missing(name)])
"""


@pytest.fixture(scope="module")
def old() -> Iterator[WorkerProcess]:
    with WorkerProcess(env={"PYTHONPATH": str(oldest_torch.folder())}) as worker:
        worker.wait_ready()
        yield worker


def farthest(first: Image.Image, second: Image.Image) -> int:
    """Return the largest difference of two images in any channel of a pixel, from 0 to 255."""
    return int(np.asarray(ImageChops.difference(first, second)).max())


def test_the_ranks_run_the_oldest_torch_and_not_the_environments(old: WorkerProcess) -> None:
    assert oldest_torch.requirements() == ["torch==2.11.*", "torchvision==0.26.*"]
    for pid in old.rank_pids():
        libraries = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "libtorch_cpu.so" in line}
        assert libraries == {str(oldest_torch.folder() / "torch" / "lib" / "libtorch_cpu.so")}


def test_an_image_and_an_adapters_image_are_those_of_the_torch_that_is_pinned(old: WorkerProcess, worker: WorkerProcess) -> None:
    plain = old.image(**ASKED)
    seen = digit_judge.judge(plain)
    assert (seen.digit, seen.colour) == (7, "red")
    assert old.put_adapter("stripes", STRIPES).status_code in (200, 202)
    old.wait_for(lambda: [one["state"] for one in old.state()["adapters"]] == ["Loaded"], what="the adapter")
    striped = old.image(**ASKED, model="stripes")
    assert digit_judge.has_style(striped, "stripes")
    assert farthest(plain, worker.image(**ASKED)) <= 2
    assert farthest(striped, worker.image(**ASKED, model="stripes")) <= 2


def test_it_sleeps_and_wakes_to_the_same_image(old: WorkerProcess) -> None:
    before = old.image(**ASKED)
    assert old.sleep(level="HostMemory")["state"] == "asleep"
    old.wake()
    assert old.image(**ASKED).tobytes() == before.tobytes()


def test_it_has_every_name_of_torch_that_the_worker_writes_out() -> None:
    # Code for a GPU does not run here.
    names = sorted(names_of_torch())
    assert len(names) > 50 and "torch.cuda.Stream" in names
    environment = {"PYTHONPATH": str(oldest_torch.folder())}
    ran = subprocess.run(
        [sys.executable, "-c", MISSING, *names, "torch.nothing"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert ran.stdout.strip() == "['torch.nothing']", ran.stderr
