# SPDX-License-Identifier: Apache-2.0
"""`python3 -m tools.gpu`, as `make gpu` runs it: the first minutes on a machine with one GPU. Needs no virtual environment.

Every line is printed when it is known; the last one is JSON, also in a file. Ends with 1 if an item failed, found no time or no device.
Figures that miss their target are named and do not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.requirements import ROOT

from .items import ITEMS, MODELS, Item
from .report import FAILED, NO_TIME, SKIPPED, Outcome, summary
from .runner import NO_DEVICE, Runner, Settings
from .wheels import FOLDER, JUDGE, folder_for, this_python, unpack, write_own_metadata

TOTAL_S = 480.0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; an unknown item or option ends the program with a message."""
    parser = argparse.ArgumentParser(prog="make gpu", description="The first minutes on a machine with one GPU.")
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"all by default; there are {', '.join(item.name for item in ITEMS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda by default")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, whose figures mean nothing, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="time in all; items beyond it are skipped (default: %(default)g)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor for the time of each item (default: %(default)g)")
    parser.add_argument("--output", type=Path, default=Path("gpu-output"), help="folder of the log and the JSON (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=FOLDER, help="folder that `make gpu-wheels` filled")
    parser.add_argument("--packages", type=Path, help="folder of installed packages, in place of the wheels")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.items) - {item.name for item in ITEMS}):
        parser.error(f"unknown item {unknown[0]}")
    return options


def chosen(names: list[str], *, tiny: bool) -> list[Item]:
    """Return the items of these names in their fixed order, or all without names; the item that finds the device is always the first.

    With `tiny` the models share a process, to save its imports.
    """
    found = [item for item in ITEMS if not names or item.name in names or item is ITEMS[0]]
    return [replace(item, process="models") if tiny and item.process in MODELS else item for item in found]


def environment(options: argparse.Namespace, compiled: Path, *packages: Path) -> dict[str, str]:
    """Return the environment for the items' processes: `packages` and our own code come first in PYTHONPATH, and no model is downloaded.

    Bytecode is kept where this process keeps it, or else in the folder `compiled`. Without it each process would compile the sources of all
    libraries.
    """
    judge = options.wheels / JUDGE
    path = [*map(str, packages), str(ROOT), str(ROOT / "worker" / "src"), str(ROOT / "tests")]
    path += [place for place in [os.environ.get("PYTHONPATH")] if place]
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", str(compiled)),
        "DIFFUSION_GPU_JUDGE": str(judge.resolve()),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def exit_code(outcomes: list[Outcome]) -> int:
    """Return 1 if an item failed, found no time or no device, else 0; other skipped items and missed targets do not count."""
    return int(any(outcome.status in (FAILED, NO_TIME) or outcome.error == NO_DEVICE for outcome in outcomes))


def main(arguments: list[str]) -> int:
    """Unpack the carried packages, run the chosen items, print and write the outcome, and return the exit code.

    Without wheels for this Python it returns 1 and runs nothing.
    """
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-packages-") as temporary:
        own, packages = Path(temporary) / "own", options.packages
        write_own_metadata(own)
        if packages is None:
            wheels = sorted(folder_for(this_python(), options.wheels).glob("*.whl"))
            if not wheels:
                print(
                    f"no wheels for Python {this_python()} in {options.wheels}: run `make gpu-wheels` where a network is", file=sys.stderr
                )
                return 1
            packages = Path(temporary) / "carried"
            unpack(wheels, packages)
        settings = Settings(options.device, options.tiny, options.seconds, options.patience, options.output)
        runner = Runner(
            settings,
            lambda line: print(line, flush=True),
            environment=environment(options, Path(temporary) / "compiled", packages.resolve(), own),
        )
        outcomes = runner.run(chosen(options.items, tiny=options.tiny))
    found = summary(outcomes, device=options.device, tiny=options.tiny, seconds=runner.seconds)
    (options.output / "gpu.json").write_text(json.dumps(found, indent=1))
    for outcome in outcomes:
        if outcome.status in (FAILED, NO_TIME, SKIPPED) or (outcome.missed and not options.tiny):
            print(f"{outcome.name}: {outcome.status}{', missed ' + ', '.join(outcome.missed) if outcome.missed else ''}")
    print(json.dumps(found), flush=True)
    return exit_code(outcomes)


if __name__ == "__main__":
    # So that an interrupted run ends the processes of its items.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
