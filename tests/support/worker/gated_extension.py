# SPDX-License-Identifier: Apache-2.0
"""A worker extension that stops real ranks in the middle of a sleep, a wake or an adapter's load, until a test lets them go on.

A gate is a file in the folder of `GATES`: while `wake` is there, every rank but the first waits before it wakes; the first has
done its part by then. With one rank, that one waits.
"""

import os
import time
from pathlib import Path
from typing import Any

from support.worker.corrupting_extension import flip

GATES = "DIFFUSION_TEST_GATES"
# A test that forgets its gate fails by a deadline of the worker's own, and not never.
LONGEST_S = 60.0


class Gated:
    """Waits at closed gates."""

    _rank: int
    _config: Any
    model_runner: Any

    def handle_sleep_task(self, **arguments: Any) -> Any:
        """A sleep, after the gate `sleep`."""
        self._pass("sleep")
        return super().handle_sleep_task(**arguments)  # type: ignore[misc]

    def handle_wake_task(self, **arguments: Any) -> Any:
        """A wake, after the gate `wake`; where `spoil` is closed, once, it brings back weights of which one bit
        is another, and where `spoil-adapters` is, so are the copies of adapters in host memory."""
        self._pass("wake")
        answer = super().handle_wake_task(**arguments)  # type: ignore[misc]
        if self._spoils("spoil"):
            flip(self.model_runner.weights.tensors()[0])
        if self._spoils("spoil-adapters"):
            for _, kept in self.model_runner.loras.host_copies().values():
                kept[0].neg_()
        return answer

    def add_lora(self, **arguments: Any) -> Any:
        """An adapter's load, after the gate `adapter`."""
        self._pass("adapter")
        return super().add_lora(**arguments)  # type: ignore[misc]

    def _spoils(self, name: str) -> bool:
        gate = Path(os.environ[GATES]) / name
        if not self._waits or not gate.exists():
            return False
        gate.unlink()
        return True

    @property
    def _waits(self) -> bool:
        return self._rank > 0 or bool(self._config.ranks == 1)

    def _pass(self, name: str) -> None:
        gate, deadline = Path(os.environ[GATES]) / name, time.monotonic() + LONGEST_S
        if self._waits:
            while gate.exists() and time.monotonic() < deadline:
                time.sleep(0.005)


class Gates:
    """The test's side: closes and opens them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def env(self) -> dict[str, str]:
        """For the worker's process."""
        return {GATES: str(self._folder)}

    def close(self, name: str) -> None:
        """Who comes to it waits from now on."""
        (self._folder / name).touch()

    def open(self, name: str) -> None:
        """Who waits goes on."""
        (self._folder / name).unlink(missing_ok=True)
