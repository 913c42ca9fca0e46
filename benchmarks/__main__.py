# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [GOAL]`: runs one goal's benchmark, or all; each ends with one line of JSON and keeps its raw samples.

Exit status 0 whatever the figures say, 1 when a measurement failed. The goals are those of the design's `performance.md`.
"""

import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    adapter_loading,
    adapters,
    broadcast,
    cold_request,
    joining,
    loading,
    mixed_sizes,
    operator_scale,
    overhead,
    server,
    sleep,
    wake,
)
from benchmarks.result import Measured

GOALS: dict[str, Callable[[], Measured]] = {
    "P1": overhead.measure,
    "P2": adapters.measure,
    "P3": adapter_loading.measure,
    "P4": sleep.measure,
    "P5": wake.measure,
    "P6": loading.measure,
    "P7": mixed_sizes.measure,
    "P8": joining.measure,
    "P9": broadcast.measure,
    "P10": server.measure,
    "P11": cold_request.measure,
    "P12": operator_scale.measure,
}
OUTPUT = Path("bench-output")


def report(goal: str, measured: Measured) -> dict[str, object]:
    """The last line of a goal, with its samples written beside it."""
    OUTPUT.mkdir(exist_ok=True)
    samples = OUTPUT / f"{goal}.json"
    samples.write_text(json.dumps(measured.samples, indent=1))
    return {
        "goal": goal,
        "results": measured.results,
        "targets": measured.targets,
        "device": f"cpu {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "samples": str(samples),
    }


def main(arguments: list[str]) -> int:
    """Run the goals named, or all."""
    unknown = [goal for goal in arguments if goal not in GOALS]
    if unknown:
        print(f"unknown goal {', '.join(unknown)}; there are: {', '.join(GOALS)}", file=sys.stderr)
        return 1
    for goal in arguments or GOALS:
        try:
            print(json.dumps(report(goal, GOALS[goal]())), flush=True)
        except (OSError, RuntimeError) as error:
            print(f"{goal}: the measurement failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    # So that what a benchmark started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
