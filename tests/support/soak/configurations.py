# SPDX-License-Identifier: Apache-2.0
"""The configurations' part of `make soak`: hostile and ordinary configurations of peft, loaded or refused as peft itself would."""

import itertools
import random
from pathlib import Path

from support.lora import hostile_configurations
from support.soak.frame import Outcome
from support.soak.puts import outcome_of_puts, put_all
from support.worker.process import WorkerProcess


def run_configurations(folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Start a worker for `put_configurations`."""
    with WorkerProcess(options=("--max-cached-loras=64",)) as worker:
        worker.wait_ready()
        return put_configurations(worker, folder, count, seed=seed, limit_s=limit_s)


def put_configurations(worker: WorkerProcess, folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Put `count` adapters with hostile peft configurations to a worker, or as many as there is time for. Wrong answers are faults."""
    outcome, rng, numbers = outcome_of_puts(seed), random.Random(seed), itertools.count()
    put_all(worker, outcome, count, limit_s, draw=lambda: hostile_configurations.draw(rng, folder / f"configuration-{next(numbers)}"))
    return outcome
