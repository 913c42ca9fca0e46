# SPDX-License-Identifier: Apache-2.0
"""A worker extension, as a user would write one; tests load it into real ranks by `support.worker.polite_extension:Polite`."""

import hashlib
import os
import time
from typing import Any

from diffusion_worker.messages import RequestSpec


class Polite:
    """Says what a rank knows, and misbehaves when told to."""

    _rank: int
    model_runner: Any

    def greet(self, name: str) -> str:
        """The rank's number in a sentence."""
        return f"hello {name} from rank {self._rank}"

    def nap(self, seconds: float, only_rank: int) -> None:
        """Do nothing for a while, on one rank."""
        if self._rank == only_rank:
            time.sleep(seconds)

    def trip(self, only_rank: int) -> None:
        """Fail, on one rank."""
        if self._rank == only_rank:
            raise ValueError("tripped")

    def lose_device(self) -> None:
        """What CUDA says when the device is lost to this process."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def leave(self, code: int) -> None:
        """End the process."""
        os._exit(code)

    def make(self, prompt: str) -> str:
        """Make an image on all ranks together; returns the digest of its pixels."""
        spec = RequestSpec(request_id="made", prompt=prompt, seed=1, height=32, width=32, steps=2)
        return hashlib.sha256(self.generate(spec).tobytes()).hexdigest()  # type: ignore[attr-defined]

    def pipeline_name(self) -> str:
        """The class of the pipeline that is served."""
        return type(self.model_runner.pipeline).__name__


class EarlyDeath:
    """Ends the process of rank 1 before it has loaded."""

    _rank: int

    def load_model(self, report: Any, *, asleep: bool = False) -> Any:
        """Never returns on rank 1, and on the others only when their server gives them up."""
        if self._rank == 1:
            os._exit(9)
        time.sleep(600)


class Stuck:
    """Hangs in every step, on rank 1."""

    _rank: int

    def execute_stepwise(self, tick: Any, frames: Any) -> Any:
        """Never returns on rank 1; the others wait for it where they need its rows."""
        if self._rank == 1:
            time.sleep(600)
        return super().execute_stepwise(tick, frames)  # type: ignore[misc]
