# SPDX-License-Identifier: Apache-2.0
"""SIGTERM at random moments of a worker's start, the first of which come before it has imported anything. No signal may be lost.

Real: the program, its ranks and the signals. Not real: the container, in which the program would be the child of tini.
"""

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from support.soak.frame import Outcome
from support.worker.process import WorkerProcess

PROGRAM = ("-c", "from diffusion_worker.program import main; main()")
# Ends by the signal itself before the program has a handler, by that handler, or by the server.
ENDS = (-signal.SIGTERM, 128 + signal.SIGTERM, 0)


def run_signals(folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Start a worker `count` times, and send it SIGTERM within twice the time that it takes to listen; return the tally of the ends."""
    outcome, rng = Outcome(seed, tallies="ends"), random.Random(seed)
    with WorkerProcess(program=PROGRAM, env={"TMPDIR": str(folder)}) as worker:
        listening_s = time.monotonic() - worker.started_at
    for number in outcome.until(count, limit_s):
        worker, at_s = WorkerProcess(program=PROGRAM, env={"TMPDIR": str(folder)}), rng.uniform(0.0, 2 * listening_s)
        with ExitStack() as ends:
            ends.push(worker)
            worker.launch()
            time.sleep(at_s)
            try:
                outcome.ends[worker.terminate()] += 1
            except AssertionError as error:
                outcome.wrong.append(f"SIGTERM after {at_s:.3f} s: {error}")
        outcome.done = number + 1
    outcome.wrong += [f"expected an end with one of {ENDS}, found {code}" for code in outcome.ends if code not in ENDS]
    return outcome
