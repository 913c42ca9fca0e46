# SPDX-License-Identifier: Apache-2.0
"""The infrastructure side of one rank: device, process group, memory and adapters; the runner does the model's side.

The public methods are those that `WorkerProc` calls by name (`Rpc.method`). Each raises `RequestError` for a caller's fault, and anything
else for a fault of the rank.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from diffusion_worker.config import WorkerConfig, usable_cores
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.loads.model_table import ModelTable
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.memory.device_memory import free_bytes
from diffusion_worker.memory.heap import freeze_gc, give_back_heap
from diffusion_worker.messages import (
    Fingerprint,
    LoadedLoRA,
    MemoryReport,
    MemoryTag,
    ModelInfo,
    PreparedPart,
    RequestSpec,
    SleepLevel,
    SleepTask,
    TaskAck,
    Tick,
    WakeTask,
    WarmedUp,
)
from diffusion_worker.runner.device import device_of, open_device
from diffusion_worker.runner.loading.offloading import check_device
from diffusion_worker.runner.loading.replace_weights import read_weights
from diffusion_worker.runner.mirroring import mirror_weights
from diffusion_worker.runner.model_runner import DiffusionModelRunner, ReportProgress, StepOutput
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.profiler import RankProfiler
from diffusion_worker.runner.stepping.pixels import Pixels
from diffusion_worker.runner.task_acks import TaskAcks


class Rendezvous(msgspec.Struct, frozen=True):
    """The meeting point of a generation's ranks: rank 0 serves the store on a socket that its parent bound."""

    host: str
    port: int
    generation: int


class DiffusionWorker:
    """A rank of a worker, with its device, its process group and its model runner."""

    def __init__(self, config: WorkerConfig, *, rank: int, rendezvous: Rendezvous, listener: socket.socket | None) -> None:
        self._config = config
        self._rank = rank
        self._rendezvous = rendezvous
        self._listener = listener
        self.init_device()
        self.model_runner = DiffusionModelRunner(config, self.device, self.parallel)
        self._acks = TaskAcks(rank, resident_bytes=self.resident_bytes, free_memory=self.free_memory)
        self._profiler = RankProfiler(config.profile_dir, rank=rank)

    def init_device(self) -> None:
        """Choose the device, try it if it is a GPU, give torch this rank's share of the cores, and join the process group.

        Raises:
            ConfigError: the device does not fit the options. RankFault: the GPU cannot be used.
        """
        torch.set_num_threads(max(1, usable_cores() // self._config.ranks))
        self.device = device_of(self._config.device, self._rank)
        if self.device.type == "cuda":
            open_device(self.device, self._config)
        self.parallel = Parallel(
            rank=self._rank,
            world=self._config.ranks,
            device=self.device,
            store=self._store(),
            # The server's deadlines come first; this one is the last resort.
            timeout_s=self._config.collective_timeout_s,
            tensor=self._config.tensor,
            sequence=self._config.sequence,
            shard=self._config.shard,
        )

    def _store(self) -> Store:
        """Return the store of the rendezvous, under a prefix of this generation; addresses of an earlier generation are stale.

        With a `listener` this process serves the store on it, otherwise it connects to that of rank 0.
        """
        place = self._rendezvous
        if self._listener is not None:
            store = TCPStore(
                place.host, place.port, self._config.ranks, True, wait_for_workers=False, master_listen_fd=os.dup(self._listener.fileno())
            )
        else:
            store = TCPStore(place.host, place.port, self._config.ranks, False, wait_for_workers=False)
        return PrefixStore(f"generation-{place.generation}", store)

    def load_model(self, report: ReportProgress, *, asleep: bool = False) -> ModelInfo:
        """Load the model, without its weights if `asleep`, and return its description.

        The free memory in it is the room beside all weights, also while they are not loaded. Raises ConfigError.
        """
        check_device(self._config.offload, self.device)
        model = self.model_runner.load_model(report, asleep=asleep)
        freeze_gc()
        resident = self.memory().weights_resident_bytes
        free = free_bytes(self.device, ranks=self._config.ranks, weights_bytes=model.weights_bytes, resident_bytes=resident)
        return msgspec.structs.replace(model, free_bytes=free)

    def init_lora_manager(self) -> None:
        """Start over with a manager that has no adapters; without a loaded pipeline do nothing. A load makes the first manager by itself.

        Call it on all ranks at the same point, since they must have the same adapters. The slots of the old manager are freed.

        Raises:
            RequestError: Busy while requests run; Asleep.
        """
        self.model_runner.init_lora_manager()

    def warm_up(self) -> WarmedUp:
        """Run the warm-up's requests of few steps; return the outcome of the options and the measured times of each run.

        Compiled code stays. All requests are dropped, and the prompt cache is emptied with its counts. Raises RequestError if a request
        fails.
        """
        made = self.model_runner.warm_up()
        self.free_memory()
        return made

    def execute_stepwise(self, tick: Tick, frames: Sequence[bytes] = ()) -> StepOutput:
        """Drop the requests in `tick.leave`, start those in `tick.join`, then advance those in `tick.advance` (None: all) by one step.

        `frames` are the images of the requests that join; `tick.frames` counts them for each.
        """
        return self.model_runner.execute_stepwise(tick, frames)

    def execute_model(self, request: RequestSpec, frames: Sequence[bytes] = ()) -> Pixels:
        """Run one request from start to end, with its adapters, on all ranks together; running requests wait.

        It is for worker extensions and scripts, which have no server that sends ticks. `frames` are the request's images.

        Returns:
            uint8 [height, width, 3], or with frames before that.

        Raises:
            RequestError: InvalidRequest without a prompt; Busy while another request has the model for itself; AdapterNotLoaded; the
                request's own error.
        """
        return self.model_runner.execute_model(request, frames)

    def generate(self, request: RequestSpec, frames: Sequence[bytes] = ()) -> Pixels:
        """Call `execute_model`; vLLM-Omni's worker has both names."""
        return self.execute_model(request, frames)

    def add_lora(self, *, request: LoRARequest, options: LoadOptions, parts: Sequence[PreparedPart] = ()) -> LoadedLoRA:
        """Register an adapter in host memory; requests that use it put it into a slot.

        `parts` have what the process of a load made of the adapter's files. Without them the files are read here.
        """
        return self.model_runner.add_lora(request, options, parts)

    def adapter_table(self) -> ModelTable | None:
        """Describe the model of this rank for the process of a load; return None where no model is loaded."""
        loras = self.model_runner.loras
        return None if loras is None else loras.table()

    def remove_lora(self, *, lora_int_id: int) -> bool:
        """Forget an adapter by its id, with its copy in host memory if no other id shares it. Return False for an unknown id."""
        loras = self.model_runner.loras
        return loras is not None and loras.remove_adapter(lora_int_id)

    def list_loras(self) -> list[int]:
        """List the numbers under which adapters are registered, in ascending order; empty while no model is loaded."""
        loras = self.model_runner.loras
        return [] if loras is None else loras.list_adapters()

    def pin_lora(self, *, lora_int_id: int) -> bool:
        """Protect a registered adapter's copy in host memory from eviction; its slot can still be reused.

        Return False for an unknown id.
        """
        loras = self.model_runner.loras
        return loras is not None and loras.pin_adapter(lora_int_id)

    def unpin_lora(self, *, lora_int_id: int) -> bool:
        """End the protection that `pin_lora` gave, so that the adapter can be evicted.

        Return False for an id that is unknown or has none.
        """
        loras = self.model_runner.loras
        return loras is not None and loras.unpin_adapter(lora_int_id)

    def load_weights(self, *, path: str) -> list[str]:
        """Read a safetensors file, or all of a folder, into the model's tensors of the same names; return these names, sorted.

        Raises RequestError.
        """
        return sorted(self.model_runner.load_weights(read_weights(Path(path))))

    def mirror_weights(self) -> None:
        """Copy the weights to host memory for a later sleep at HostMemory; do nothing on a CPU, while asleep, or with a mirror.

        Call it on all ranks together: they share one mirror if their weights are alike.

        Raises:
            RequestError: InsufficientMemory, on all ranks and before anything was allocated.
        """
        alike = self._config.tensor == 1 and self._config.shard == 1
        mirror_weights(self.model_runner.weights, self.parallel, self.device, alike=alike)

    def sleep(self, level: SleepLevel = SleepLevel.HOST_MEMORY) -> int:
        """Drop all requests, then free weights, adapter slots and caches; return the number of freed bytes, 0 if all slept already.

        `level` decides what stays in host memory for a wake. Raises RequestError if the weights cannot sleep or their copies do not fit
        there.
        """
        before = self.resident_bytes()
        self.model_runner.release(level)
        return max(0, before - self.resident_bytes())

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Restore the memory of these tags, of all if None. Raises RequestError, and then all of these tags sleep as before."""
        self.model_runner.restore(tuple(MemoryTag) if tags is None else tags)

    def resident_bytes(self) -> int:
        """Add up the memory that a sleep frees and a wake brings back: allocated weights, adapter slots and the prompt cache, in bytes."""
        memory = self.memory()
        return memory.weights_resident_bytes + memory.adapter_slots_resident_bytes + memory.cache_bytes

    def handle_sleep_task(self, *, task: SleepTask) -> TaskAck:
        """Call `sleep` for a task, and return an acknowledgement of success or of the failure; raise RankFault if the rank cannot go on.

        A task that succeeded before is not done again: its old acknowledgement is returned.
        """
        return self._acks.acknowledge(task, lambda: self.sleep(task.level))

    def handle_wake_task(self, *, task: WakeTask) -> TaskAck:
        """Call `wake_up` for a task, and return an acknowledgement of success or of the failure; raise RankFault if the rank cannot go on.

        A task that succeeded before is not done again: its old acknowledgement is returned.
        """
        return self._acks.acknowledge(task, lambda: self.wake_up(task.tags))

    def fingerprint(self, *, probe: bool, contents: bool = True) -> Fingerprint:
        """Return a checksum of all weights, a line for each adapter and, with `probe`, digest and cells of a small image from a fixed seed.

        Without `contents` the image alone is in it, and no weights are read. Call it on all ranks together.

        Raises:
            RequestError: Asleep; Busy while requests run; InsufficientMemory; InvalidRequest with --shard, because only a wake needs a
                fingerprint, and such a worker never sleeps.
        """
        if self._config.shard > 1:
            message = "fingerprint: not supported with --shard: it serves to check a wake, and this worker never sleeps"
            raise RequestError(ErrorCode.INVALID_REQUEST, message)
        return self.model_runner.fingerprint(probe=probe, contents=contents)

    def synchronize(self) -> None:
        """Wait until the GPU has done all queued work; return at once on a CPU.

        `WorkerProc` sends earlier results before the answer to this call.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def re_init_pipeline(self, *, pipeline: str) -> ModelInfo:
        """Load the model folder again with `pipeline`: the name of a class in diffusers, or MODULE:CLASS for your own.

        Return the new description. First the running requests, the adapters and the old pipeline are dropped, so that memory never holds
        two pipelines.

        Raises:
            RequestError: Asleep; InvalidRequest if the class is missing, and then nothing was dropped. InvalidRequest too if it does not
                load; then the earlier class is loaded again, without requests and adapters.
        """
        model = self.model_runner.re_init_pipeline(pipeline)
        freeze_gc()
        return model

    def profile(self, *, is_start: bool, prefix: str = "") -> str | bool | None:
        """Start a trace, or end the running one, on this rank.

        A start returns False if there is a trace already, or no folder for traces is configured. An end returns the path of the written
        file, or None if no trace was running.
        """
        return self._profiler.start(prefix) if is_start else self._profiler.stop()

    def free_memory(self) -> None:
        """Collect garbage, as a failed call leaves it in reference cycles, and return unused memory to the system and the device."""
        give_back_heap(self.device)

    def memory(self) -> MemoryReport:
        """Report the bytes of weights, adapters and caches on this rank by place, and the tags that are asleep."""
        return self.model_runner.memory()

    def shutdown(self) -> None:
        """Leave the process group."""
        self.parallel.close()
