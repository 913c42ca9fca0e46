# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [--tiny] [--device cuda] [GOAL …]`: runs benchmarks, all by default.

Each ends with one line of JSON and keeps its raw samples.

Exit status 0 whatever the figures say, 1 when a measurement failed. The goals are those of the design's `performance.md`.
`--tiny` takes seconds for each and shows that it runs; its figures mean nothing. With `--device cuda` run those that take a device.
"""

import argparse
import json
import os
import platform
import signal
import sys
from pathlib import Path

from benchmarks.registry import GOALS
from benchmarks.result import Measured

OUTPUT = Path("bench-output")


def report(goal: str, measured: Measured, *, tiny: bool = False, device: str = "cpu") -> dict[str, object]:
    """Return the last line of a goal, and write its samples to a file, over those of an earlier run.

    Samples of tiny runs have a folder of their own. The line has the machine's cores and load beside the figures.
    """
    folder = OUTPUT / "tiny" if tiny else OUTPUT
    folder.mkdir(parents=True, exist_ok=True)
    samples = folder / f"{goal}.json"
    samples.write_text(json.dumps(measured.samples, indent=1))
    return {
        "goal": goal,
        "results": measured.results,
        "targets": measured.targets,
        "beside": measured.beside,
        "rounds": measured.rounds,
        "tiny": tiny,
        "device": f"{device} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "samples": str(samples),
    }


def main(arguments: list[str]) -> int:
    """Measure the goals given in `arguments`, by default every goal that supports the device, and print a line of JSON for each.

    Returns 1 for an unknown goal, or after the first measurement that fails, which ends the run; otherwise 0.
    """
    options = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures; each goal ends with one line of JSON.")
    options.add_argument("goals", nargs="*", metavar="GOAL", help=f"all by default; there are {', '.join(GOALS)}")
    options.add_argument("--tiny", action="store_true", help="seconds for each, to see that it runs; the figures mean nothing")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the goals that run on a GPU (default: cpu)")
    given = options.parse_args(arguments)
    unknown = [goal for goal in given.goals if goal not in GOALS]
    if unknown:
        print(f"unknown goal {', '.join(unknown)}; there are: {', '.join(GOALS)}", file=sys.stderr)
        return 1
    for goal in given.goals or [name for name, goal in GOALS.items() if given.device == "cpu" or goal.takes_device]:
        print(f"{goal}: {'seconds' if given.tiny else f'about {GOALS[goal].minutes} minutes on two cores'}", file=sys.stderr, flush=True)
        try:
            measured = GOALS[goal].measure(tiny=given.tiny, device=given.device)
            print(json.dumps(report(goal, measured, tiny=given.tiny, device=given.device)), flush=True)
        except (OSError, RuntimeError) as error:
            print(f"{goal}: the measurement failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    # So that what a benchmark started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
