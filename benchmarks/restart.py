# SPDX-License-Identifier: Apache-2.0
"""P18: how long a worker is without its rank after that was killed, with a standby against without one.

`restart_ratio`: the seconds of a worker that has a standby past its imports, over those of a worker without standbys. They are from the
SIGKILL to the answer with the first image made afterwards. Both are real servers with the digits model and one spawned rank, as on a GPU.
The image is asked for over HTTP right after the signal. So the notice of the death, the new rank, its model and the image are in it.

The digits model loads in a moment, so little is left beside the imports. A large model takes longer to load in both. There the seconds
saved are the same, and the ratio is nearer to 1. The next pair begins when the next standby is past its imports. `standby_again_s` is how
long that took from the image on, on a machine that had the time for it.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from benchmarks.pairs import TINY_PLAN, Plan, Times, take_pairs
from benchmarks.result import Measured
from benchmarks.server_process import listening, make_image, state, wait_ready

TARGETS = {"restart_ratio": "<= 0.25"}
STANDBY_S = 300.0
# Both halves import torch for many seconds, for which other programs leave more or less time. The ratio is far from 1.
PLAN = Plan(wanted=7, at_most=16, noise=0.30, within_s=420)


class Worker(msgspec.Struct, frozen=True):
    """A running worker: its process, its ports, and the number of standbys that it keeps."""

    process: subprocess.Popen[bytes]
    port: int
    control_port: int
    standbys: int

    def wait_for_standbys(self) -> float:
        """Wait until all standbys are past their imports, and return the seconds that it took; raise RuntimeError if they never are."""
        begun = time.monotonic()
        while state(self.control_port)["standbyRanks"] < self.standbys:
            if time.monotonic() - begun > STANDBY_S:
                raise RuntimeError(f"no standby is past its imports within {STANDBY_S:g} s: the machine has no time for them")
            time.sleep(0.1)
        return time.monotonic() - begun

    def restart(self, *, again: bool = True) -> Times:
        """Kill the rank, ask for an image at once, and return the seconds until it is there.

        With `again`, wait for the next standbys then.

        Raises:
            RuntimeError: the image was not made by a new rank.
        """
        (rank,) = (rank["pid"] for rank in state(self.control_port)["ranks"])
        begun = time.perf_counter()
        os.kill(rank, signal.SIGKILL)
        make_image(self.port)
        seconds = time.perf_counter() - begun
        if rank in (now["pid"] for now in state(self.control_port)["ranks"]):
            raise RuntimeError(f"expected an image by another rank, found it made by the killed one (pid {rank})")
        return {"s": seconds, "standby_s": self.wait_for_standbys() if again else 0.0}


def measure(*, tiny: bool = False) -> Measured:
    """Kill ranks of a worker with a standby, each between two of a worker without; the figures are medians over the pairs.

    A `tiny` run kills one rank of each, and does not wait for the next standby.
    """
    with _worker(0) as without, _worker(1) as standing_by:
        baseline = functools.cache(without.restart) if tiny else without.restart
        ours = functools.partial(standing_by.restart, again=not tiny)
        pairs = take_pairs("the restart without standbys", baseline, ours, plan=TINY_PLAN if tiny else PLAN)
    figures = {
        "restart_ratio": pairs.ratio(),
        "restart_s": pairs.ours("s"),
        "restart_without_s": pairs.baseline("s"),
        "standby_again_s": pairs.ours("standby_s"),
    }
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, pairs.samples(), [pairs])


@contextlib.contextmanager
def _worker(standbys: int) -> Iterator[Worker]:
    """Run a worker during the block that is ready, has made an image, and has its standbys."""
    with listening([sys.executable, "-m", "benchmarks.stand_ins.spawning_worker", str(standbys)]) as (process, port, control_port):
        wait_ready(process, port)
        make_image(port)
        worker = Worker(process, port, control_port, standbys)
        worker.wait_for_standbys()
        yield worker
