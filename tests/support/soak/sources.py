# SPDX-License-Identifier: Apache-2.0
"""The sources' part of `make soak`: hostile and ordinary sources of adapters. A connection to another machine is a fault too."""

import random
from functools import partial
from pathlib import Path
from threading import Event

from support.soak.frame import Outcome
from support.soak.puts import outcome_of_puts, put_all
from support.sources.hostile import Lair, swap
from support.sources.servers import SourceServer
from support.worker.process import WorkerProcess


def run_sources(folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Put `count` adapters from hostile sources to a new worker, or as many as there is time for. Wrong answers are faults, and so is a
    fetch that connected to any address but 127.0.0.1."""
    outcome, rng = outcome_of_puts(seed), random.Random(seed)
    with SourceServer().running() as server:
        lair = Lair(folder, server)
        options = ("--allow-http-sources", f"--cache-dir={folder / 'cache'}", f"--claims-dir={lair.claims}", "--max-cached-loras=64")
        env = {"HF_ENDPOINT": server.url, "PYTHONPATH": str(folder / "resolver")}
        with WorkerProcess(options=options, env=env) as worker:
            worker.wait_ready()
            put_all(worker, outcome, count, limit_s, draw=partial(lair.draw, rng), beside=partial(_swap, lair, seed))
        outcome.wrong += [f"a fetch connected to {address}" for address in lair.connections() - {"127.0.0.1"}]
    return outcome


def _swap(lair: Lair, seed: int, over: Event) -> None:
    rng = random.Random(seed)
    while not over.wait(0.002):
        swap(lair, rng)
