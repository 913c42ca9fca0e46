# SPDX-License-Identifier: Apache-2.0
"""Every benchmark there is, by its goal. Modules are imported when they are asked for: some of them load torch and diffusers."""

import importlib
from enum import StrEnum

import msgspec

from benchmarks.result import Measured


class Needs(StrEnum):
    """Things that a benchmark runs on beside this machine's cores."""

    NOTHING = "nothing"
    APISERVER = "apiserver"
    CLUSTER = "cluster"


class Goal(msgspec.Struct, frozen=True):
    """A goal: the module of `benchmarks` that measures it, the minutes of a full run on two cores, and the things it needs.

    The module has a function `measure(*, tiny: bool) -> Measured`. With `takes_device` that function takes `device` too, and a GPU may be
    used.
    """

    module: str
    minutes: int
    needs: Needs = Needs.NOTHING
    takes_device: bool = False

    def measure(self, *, tiny: bool, device: str = "cpu") -> Measured:
        """Import the goal's module and measure; a `tiny` run takes seconds, and nobody judges its figures.

        Raises:
            RuntimeError: the measurement failed, or `device` is a GPU and the module knows only the CPU.
            OSError: the measurement failed in a call to the operating system.
        """
        where = {"device": device} if self.takes_device else {}
        if device != "cpu" and not self.takes_device:
            raise RuntimeError(f"benchmarks.{self.module} runs on the CPU alone")
        measured: Measured = importlib.import_module(f"benchmarks.{self.module}").measure(tiny=tiny, **where)
        return measured


GOALS: dict[str, Goal] = {
    "P1": Goal("overhead", 1),
    "P2": Goal("adapters", 1, takes_device=True),
    "P3": Goal("adapter_loading", 2),
    "P4": Goal("sleep", 2),
    "P5": Goal("wake", 6),
    "P6": Goal("loading", 6),
    "P7": Goal("mixed_sizes", 5),
    "P8": Goal("joining", 4),
    "P9": Goal("broadcast", 1),
    "P10": Goal("server", 2),
    "P11": Goal("cold_request", 5, Needs.CLUSTER),
    "P12": Goal("operators.scale", 14, Needs.APISERVER),
    "P17": Goal("operators.watch", 15, Needs.APISERVER),
    "P18": Goal("restart", 6),
}
