# SPDX-License-Identifier: Apache-2.0
"""`make soak`: the parts, one after the other, all of them also after one that found something.

Ends with 1 and what went wrong: an answer with another code than it should have, an image other than the one made alone, a
request without an answer, or rows, memory, descriptors, processes or folders that are left. Where the minutes are over
before the requests are, it says how many there were.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from support.operator.real_apiserver import own_apiserver
from support.soak.adapter_files import run_files
from support.soak.adapters import run_adapters
from support.soak.edge import run_edge
from support.soak.frame import Outcome
from support.soak.node import run_node
from support.soak.operator_manifests import run_manifests
from support.soak.operator_sequences import run_sequences
from support.soak.sleep import run_sleep
from support.soak.traffic import run_both


def _alone(run: Callable[..., Coroutine[Any, Any, Outcome]]) -> Callable[..., Outcome]:
    """Run a part on an API server of its own."""

    def run_alone(folder: Path, **limits: float) -> Outcome:
        with own_apiserver() as kubeconfig:
            return asyncio.run(run(folder, kubeconfig, **limits))

    return run_alone


# Those that count up to a number, with the option that sets it and its default.
PARTS: dict[str, tuple[Callable[..., Outcome], str, int]] = {
    "edge": (run_edge, "edge-requests", 10_000),
    "adapters": (run_adapters, "adapter-requests", 5_000),
    "adapter-files": (run_files, "adapter-files", 10_000),
    "sleep": (run_sleep, "sleep-sequences", 500),
    "manifests": (_alone(run_manifests), "manifests", 5_000),
    "operator": (_alone(run_sequences), "operator-sequences", 500),
}


def main() -> int:
    """Run, print, judge."""
    options = argparse.ArgumentParser(description="Soak a real worker of two ranks.")
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--kill-requests", type=int, default=1_000)
    options.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    for _, option, count in PARTS.values():
        options.add_argument(f"--{option}", type=int, default=count)
    options.add_argument("--minutes", type=float, default=60.0, help="For each part.")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--part", action="append", choices=("traffic", *PARTS, "node"), help="Only this one; may be given again.")
    asked = options.parse_args()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"soak-{os.getpid()}"
    folder.mkdir()
    try:
        # The node's part needs a cluster of its own, so it is run on demand only.
        return int(sum(_run(part, asked, folder) for part in asked.part or ("traffic", *PARTS)) > 0)
    finally:
        shutil.rmtree(folder)


def _run(name: str, asked: argparse.Namespace, folder: Path) -> bool:
    """Tell if something was wrong."""
    limits = {"seed": asked.seed, "limit_s": asked.minutes * 60}
    if name == "traffic":
        counts = {"requests": asked.requests, "kill_requests": asked.kill_requests}
        outcomes = run_both(folder, **counts, kill_every_s=asked.kill_every, **limits)
        found = list(zip(("soak", "killed ranks"), outcomes, counts.values(), strict=True))
    elif name == "node":
        found = [("node", run_node(**limits), 0)]
    else:
        run, option, _ = PARTS[name]
        count = getattr(asked, option.replace("-", "_"))
        found = [(name.replace("-", " "), run(folder, count=count, **limits), count)]
    for label, outcome, wanted in found:
        print(outcome.line(label, wanted), flush=True)
    return any(outcome.wrong or getattr(outcome, "lost", 0) for _, outcome, _ in found)


if __name__ == "__main__":
    sys.exit(main())
