# SPDX-License-Identifier: Apache-2.0
"""`make soak`: the parts, one after the other; a part that finds a fault does not end the run.

It prints the faults and ends with 1 if there are any. Faults are an unexpected code, an image that differs from the one made alone, and a
request without an answer. Leaked rows, memory, descriptors, processes and folders are faults too. If the minutes are over first, it prints
how many requests there were.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from support.apiserver.real_apiserver import own_apiserver
from support.encoding.soak import run_images
from support.soak.adapter_files import run_files
from support.soak.adapters import run_adapters
from support.soak.configurations import run_configurations
from support.soak.edge import run_edge
from support.soak.frame import Outcome
from support.soak.node import run_node
from support.soak.operator_lives import TwoOperators
from support.soak.operator_sequences import run_sequences
from support.soak.operators import run_operators
from support.soak.sleep import run_sleep
from support.soak.sources import run_sources
from support.soak.traffic import run_both
from support.worker.start_signals import run_signals


def _alone(run: Callable[..., Coroutine[Any, Any, Outcome]], *, audited: bool = False, **more: Any) -> Callable[..., Outcome]:
    """Wrap a coroutine function as a part of the soak that starts an API server for each run, with an audit log if `audited`."""

    def run_alone(folder: Path, count: int, **limits: float) -> Outcome:
        with own_apiserver(audited=audited) as kubeconfig:
            return asyncio.run(run(folder, kubeconfig, count=count, **limits, **more))

    return run_alone


# The parts with their options, in order, and defaults. The last two need a cluster, so they run on demand only.
PARTS: dict[str, tuple[Callable[..., Outcome | list[Outcome]], dict[str, float]]] = {
    "traffic": (run_both, {"requests": 10_000, "kill_requests": 1_000, "kill_every": 20.0}),
    "edge": (run_edge, {"edge_requests": 10_000}),
    "adapters": (run_adapters, {"adapter_requests": 5_000}),
    "adapter-files": (run_files, {"adapter_files": 10_000}),
    "sources": (run_sources, {"sources": 500}),
    "configurations": (run_configurations, {"configurations": 500}),
    "images": (run_images, {"images": 2_000}),
    "signals": (run_signals, {"signals": 500}),
    "sleep": (run_sleep, {"sleep_sequences": 500}),
    "operator": (_alone(run_sequences), {"operator_sequences": 500}),
    "two-operators": (_alone(run_sequences, audited=True, lives=TwoOperators), {"pair_sequences": 500}),
    "node": (run_node, {}),
    "operators": (run_operators, {}),
}
ON_DEMAND = ("node", "operators")


def main() -> int:
    """Run the parts, print their outcomes, and return the exit status. SIGTERM and Ctrl-C end what a part started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell has programs in its background ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = argparse.ArgumentParser(description="Soak a real worker of two ranks.")
    for _, counts in PARTS.values():
        for option, default in counts.items():
            options.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    options.add_argument("--minutes", type=float, default=60.0, help="The most minutes for each part.")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--part", action="append", choices=PARTS, help="Run only this part; repeat the option for more parts.")
    asked = options.parse_args()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"soak-{os.getpid()}"
    folder.mkdir()
    faults = sum(_run(part, asked, folder) for part in asked.part or [part for part in PARTS if part not in ON_DEMAND])
    if faults:
        print(f"The logs are in {folder}.", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


def _run(name: str, asked: argparse.Namespace, folder: Path) -> bool:
    """Run the part `name` with the options on the command line and print a line per outcome. Return true if any has faults or losses."""
    run, counts = PARTS[name]
    given = [getattr(asked, option) for option in counts]
    found = run(folder, *given, seed=asked.seed, limit_s=asked.minutes * 60)
    outcomes = found if isinstance(found, list) else [found]
    labels = ("soak", "killed ranks") if name == "traffic" else (name.replace("-", " "),)
    for label, outcome, wanted in zip(labels, outcomes, given or [0], strict=False):
        print(outcome.line(label, wanted), flush=True)
    return any(outcome.wrong or getattr(outcome, "lost", 0) for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
