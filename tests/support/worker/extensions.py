# SPDX-License-Identifier: Apache-2.0
"""Worker extensions, which tests load into ranks by `support.worker.extensions:Polite` and the like.

Real: the ranks that they are mixed into, whose `_rank`, `_config` and `model_runner` they use. Not real: the faults of memory, a device or
a process, which the extensions make.
"""

import functools
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffusion_worker.memory import host_memory
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner import model_runner
from diffusion_worker.runner.device import open_device

GATES = "DIFFUSION_TEST_GATES"
# A test that never opens its gate fails at a deadline of the worker.
LONGEST_S = 60.0
# Pixels of a latent of the digits model.
LATENT_PIXELS = 2


class Polite:
    """An extension that answers with facts about its rank, as a user's own would, and misbehaves on request."""

    def greet(self, name: str) -> str:
        return f"hello {name} from rank {self._rank}"

    def nap(self, seconds: float, only_rank: int) -> None:
        if self._rank == only_rank:
            time.sleep(seconds)

    def trip(self, only_rank: int) -> None:
        if self._rank == only_rank:
            raise ValueError("tripped")

    def lose_device(self) -> None:
        """Raise the RuntimeError that PyTorch raises after an illegal access to memory, which makes the device unusable for the process."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def leave(self, code: int) -> None:
        os._exit(code)

    def make(self, prompt: str) -> str:
        """Generate a 32 by 32 image of the prompt in two steps with seed 1, outside any tick. Return the hex SHA-256 of its pixels,
        which all ranks should agree on."""
        spec = RequestSpec(request_id="made", prompt=prompt, seed=1, height=32, width=32, steps=2)
        return hashlib.sha256(self.generate(spec).tobytes()).hexdigest()  # type: ignore[attr-defined]

    def pipeline_name(self) -> str:
        return type(self.model_runner.pipeline).__name__


class EarlyDeath:
    """An extension that lets rank 1 exit with code 9 in place of loading. Other ranks hang, as in a collective, longer than the server
    waits for them."""

    def load_model(self, report: Any, *, asleep: bool = False) -> Any:
        if self._rank == 1:
            os._exit(9)
        time.sleep(600)


class Stuck:
    """An extension that lets rank 1 sleep for ten minutes at each tick, so that any rank which needs its results is stuck too."""

    def execute_stepwise(self, tick: Any, frames: Any) -> Any:
        if self._rank == 1:
            time.sleep(600)
        return super().execute_stepwise(tick, frames)  # type: ignore[misc]


class Mirrored:
    """An extension that treats the CPU as an accelerator: sleeps of its rank need mirrors in host memory."""

    def load_model(self, report: Any, *, asleep: bool = False) -> Any:
        model_runner.ModelWeights = functools.partial(ModelWeights, mirrored=True)  # type: ignore[assignment, misc]
        return super().load_model(report, asleep=asleep)  # type: ignore[misc]


class Corrupting:
    """An extension that flips one bit at a time on the ranks that are called, for the fingerprint to detect, or limits a rank's memory."""

    def flip_weight(self) -> None:
        """Damage the weights on this rank, one bit at the end of the first tensor, as a faulty device might."""
        flip(self.model_runner.weights.tensors()[0])

    def flip_adapter(self, lora_int_id: int) -> None:
        """Flip a bit in the host memory's copy of an adapter."""
        flip(self.model_runner.loras.host_copies()[lora_int_id][1][0])

    def flip_mirror(self) -> None:
        """Flip a bit in the host memory's copy of weights that are in no file."""
        flip(next(placed.kept for placed in self.model_runner.weights._placed if placed.kept is not None))

    def limit_memory(self, cgroup: str) -> None:
        """Have the rank read its memory limit and usage from files in the folder `cgroup`, not from the kernel's."""
        host_memory.CGROUP = Path(cgroup)


class Cramped:
    """An extension whose device has no memory for a step of 48 pixels beside another request, and none for 96 pixels at all."""

    def load_model(self, report: Any, *, asleep: bool = False) -> Any:
        runner = self.model_runner
        compute = runner._compute

        def cramped(module: Any, call: Any, plain: bool) -> Any:
            if call.component == "transformer":
                side = call.arguments["hidden_states"].shape[-1]
                if side == 96 // LATENT_PIXELS or (side == 48 // LATENT_PIXELS and len(runner._states) > 1):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return compute(module, call, plain)

        runner._compute = cramped
        return super().load_model(report, asleep=asleep)  # type: ignore[misc]


class DeviceInUse:
    """An extension whose ranks open a GPU that another process keeps to itself, as in the mode EXCLUSIVE_PROCESS."""

    def init_device(self) -> None:
        def refuse(device: Any) -> None:
            raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for more.")

        torch.cuda.set_device = refuse
        open_device(torch.device("cuda:0"), self._config)


class DeviceFull:
    """An extension whose device has no memory for the weights."""

    def load_model(self, report: Any, *, asleep: bool = False) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Poisoned:
    """An extension that kills its rank in the third step of a request whose prompt has the word poison."""

    def execute_stepwise(self, tick: Any, frames: Any = ()) -> Any:
        steps = self.__dict__.setdefault("steps_of_poisons", {})
        steps.update({spec.request_id: 0 for spec in tick.join if "poison" in spec.prompt})
        for name in steps.keys() & set(tick.advance or ()):
            steps[name] += 1
            if steps[name] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_stepwise(tick, frames)  # type: ignore[misc]


class Gated:
    """An extension that stops real ranks in the middle of a sleep, a wake or an adapter's load, until a test lets them go on.

    A gate is a file in the folder of `GATES`: `sleep`, `wake` or `adapter`. While it exists, every rank but the first waits before that
    action; the first has done its part by then. With one rank, that one waits. With `spoil` the next wake restores weights with one wrong
    bit. With `spoil-adapters` it negates a tensor of each adapter's copy in host memory.
    """

    def handle_sleep_task(self, **arguments: Any) -> Any:
        self._pass("sleep")
        return super().handle_sleep_task(**arguments)  # type: ignore[misc]

    def handle_wake_task(self, **arguments: Any) -> Any:
        self._pass("wake")
        answer = super().handle_wake_task(**arguments)  # type: ignore[misc]
        if self._spoils("spoil"):
            flip(self.model_runner.weights.tensors()[0])
        if self._spoils("spoil-adapters"):
            for _, kept in self.model_runner.loras.host_copies().values():
                kept[0].neg_()
        return answer

    def add_lora(self, **arguments: Any) -> Any:
        self._pass("adapter")
        return super().add_lora(**arguments)  # type: ignore[misc]

    def _spoils(self, name: str) -> bool:
        if spoils := self._is_closed(name):
            Gates(Path(os.environ[GATES])).open(name)
        return spoils

    def _is_closed(self, name: str) -> bool:
        return (self._rank > 0 or bool(self._config.ranks == 1)) and (Path(os.environ[GATES]) / name).exists()

    def _pass(self, name: str) -> None:
        deadline = time.monotonic() + LONGEST_S
        while self._is_closed(name) and time.monotonic() < deadline:
            time.sleep(0.005)


class Troubled(Gated, Cramped, Poisoned):
    """All three at once, for a worker that tests share."""


class Gates(NamedTuple):
    """The test's side of `Gated`: it closes and opens gates."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {GATES: str(self.folder)}

    def close(self, name: str) -> None:
        """Stop the ranks that reach this gate from now on."""
        (self.folder / name).touch()

    def open(self, name: str) -> None:
        """Let the ranks at this gate go on."""
        (self.folder / name).unlink(missing_ok=True)


def write_limit(cgroup: Path, *, free_bytes: int) -> None:
    """Write the files of a folder for `limit_memory`, so that `free_bytes` of memory are left."""
    used = 1 << 30
    (cgroup / "memory.max").write_text(f"{used + free_bytes}\n")
    (cgroup / "memory.current").write_text(f"{used}\n")
    (cgroup / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")


def flip(tensor: torch.Tensor) -> None:
    """Invert the lowest bit of the tensor's last byte in place, even if the tensor requires gradients. The tensor must be contiguous."""
    assert tensor.is_contiguous()
    with torch.inference_mode():
        tensor.detach().view(-1).view(torch.uint8)[-1] ^= 1
