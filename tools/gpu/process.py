# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.gpu.process`: run items in this process and send what they find as lines of JSON.

An item that raises has failed, and the next one runs: they share what the first of them made.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from .report import FAILED, PASSED, SKIPPED

ERROR_CHARS = 600


class Skip(Exception):
    """An item does not apply on this device or with these libraries; the message is the reason, and the item counts as skipped."""


class Run:
    """The context of an item: its device and size, the things that earlier items of this process keep for it, and the ways to report."""

    def __init__(self, *, device: str, tiny: bool, send: Callable[[dict[str, Any]], None]) -> None:
        # The first word of the item's name, which is the model's for items of a model.
        self.subject = ""
        self.device = device
        self.tiny = tiny
        # Things that earlier items of this process made, by name.
        self.kept: dict[str, Any] = {}
        # Closed when the process ends.
        self.closing = contextlib.ExitStack()
        self._send = send

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU, false for the CPU."""
        return self.device != "cpu"

    def figure(self, name: str, value: float, target: str | None = None) -> float:
        """Report a figure, rounded to four digits behind the point, and return the value as it was given.

        A target such as `<= 50` is only reported: it raises nothing when missed.
        """
        self._send({"figure": name, "value": round(float(value), 4), "target": target})
        return value

    def note(self, text: str) -> None:
        """Report a line of text for people."""
        self._send({"note": text})

    def require(self, held: bool, expected: str) -> None:
        """Raise AssertionError unless `held`; `expected` completes its message "expected …"."""
        if not held:
            raise AssertionError(f"expected {expected}")


def main(arguments: list[str]) -> int:
    """Run the items given as `NAME=MODULE:FUNCTION` one after another, send lines of JSON about each into the pipe, and return 0.

    A module without a dot is one of this package. An item that raises is reported as failed, and the next one runs.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.process")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("items", nargs="+")
    options = parser.parse_args(arguments)
    # Processes that an item starts must not hold the pipe open.
    os.set_inheritable(options.pipe, False)
    with os.fdopen(options.pipe, "w", buffering=1) as pipe:
        run = Run(device=options.device, tiny=options.tiny, send=lambda said: print(json.dumps(said), file=pipe, flush=True))
        with run.closing:
            for item in options.items:
                print(json.dumps(_ended(run, item)), file=pipe, flush=True)
                gc.collect()
    return 0


def _ended(run: Run, item: str) -> dict[str, str]:
    name, _, place = item.partition("=")
    module, _, function = place.partition(":")
    run.subject = name.partition("-")[0]
    print(f"--- {name} at {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
    try:
        getattr(importlib.import_module(module if "." in module else f"{__package__}.{module}"), function)(run)
    except Skip as reason:
        return {"status": SKIPPED, "error": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"status": FAILED, "error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]}
    return {"status": PASSED}


if __name__ == "__main__":
    # An item that imports `Run` or `Skip` must find this module and not a second one.
    sys.modules["tools.gpu.process"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
