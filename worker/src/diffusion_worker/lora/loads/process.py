# SPDX-License-Identifier: Apache-2.0
"""The process of one load: it reads and checks an adapter's files, and writes the copy that each kind of rank keeps.

The process has a low priority, and bounds on memory and time. If it is killed, only its own load fails.
"""

import functools
import os
import resource
import signal
from collections.abc import Callable

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint
from diffusion_worker.lora.conversion import converter_of_table
from diffusion_worker.lora.diffusion_manager import described
from diffusion_worker.lora.layer_allowlist import LayerAllowlist
from diffusion_worker.lora.loads import pattern_time
from diffusion_worker.lora.loads.binding import AdapterBinding, components_of, write_checked
from diffusion_worker.lora.loads.layout import LaidOut
from diffusion_worker.lora.loads.model_table import ModelTable
from diffusion_worker.lora.loads.order import LoadOrder, LoadOutcome
from diffusion_worker.lora.loads.sealed_memory import map_sealed, write_sealed
from diffusion_worker.lora.model_layers import ModelLayers
from diffusion_worker.lora.naming import AdaptedModel
from diffusion_worker.messages import ErrorReport, PreparedPart

NICE = 10
PATTERN_SECONDS = 1.0
# Seconds beyond the deadline, so that the server ends a load first and reports the reason.
MORE_S = 30.0
# Bound of memory in sizes of the file: it is held as read and as laid out. Conversions and checks hold parts of it again.
COPIES = 5
MORE_BYTES = 1 << 30


def prepare_bounded(order: LoadOrder) -> LoadOutcome:
    """Do a load in a process that does nothing else, and return its parts or, for an exception of any kind, its error.

    The process keeps a low priority and bounds on time and memory. Past a bound of time the kernel kills it.
    """
    os.nice(NICE)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, order.deadline_s + MORE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    pattern_time.limit(PATTERN_SECONDS)
    label = f"adapter {order.request.lora_name!r}"
    try:
        return LoadOutcome(prepare(order, sized=_bound_memory))
    except RequestError as error:
        report = ErrorReport(error.code, error.message)
    except MemoryError:
        report = ErrorReport(
            ErrorCode.INVALID_ADAPTER, f"{label}: loading it takes more memory than {COPIES} times its file's size plus 1 GiB"
        )
    except Exception as error:
        report = ErrorReport(ErrorCode.ENGINE_FAILED, f"{label}: its load failed: {type(error).__name__}: {error}")
    return LoadOutcome(error=report)


def prepare(order: LoadOrder, *, sized: Callable[[int], None] = lambda size: None) -> list[PreparedPart]:
    """Read and check an adapter once, and write it into the order's memory for each kind of rank; return a part for each.

    `sized` gets the file's size in bytes before the factors are read.

    Raises:
        RequestError: adapters are off, or the adapter is wrong or does not fit the model.
    """
    tables = [msgspec.msgpack.decode(table, type=ModelTable) for table in order.tables]
    name = order.request.lora_name
    require_layers(tables[0], name)
    bindings = [_binding(table) for table in tables]
    model = AdaptedModel(denoiser=tables[0].denoiser, convert=converter_of_table(tables[0].converter), names=tables[0].modules.keys())

    def judge(checkpoint: LoRACheckpoint) -> None:
        bindings[0].bind(checkpoint, name=name)

    checkpoint = read_checkpoint(
        order.request.lora_path,
        root=order.request.lora_root,
        name=name,
        options=order.options,
        model=model,
        judge=judge,
        sized=sized,
    )
    places = zip(bindings, order.ranks, order.memories, strict=True)
    return [_part(checkpoint, binding, ranks, memory, name) for binding, ranks, memory in places]


def require_layers(table: ModelTable, name: str) -> None:
    """Raise RequestError if adapters are off, or if the model has no layer that they can change."""
    if not table.slots:
        raise RequestError(ErrorCode.CAPACITY_EXCEEDED, f"adapter {name!r}: adapters are off, --max-loras is 0")
    if not table.layers:
        found = ", ".join(table.components.values()) or "no component"
        raise RequestError(ErrorCode.NO_MATCHING_MODULES, f"adapter {name!r}: the model has no layer for adapters in {found}")


def _binding(table: ModelTable) -> AdapterBinding:
    layers = ModelLayers.of_table(table)
    return AdapterBinding(layers, LayerAllowlist(table.targets, layers), table.components, max_rank=table.max_rank)


def _part(checkpoint: LoRACheckpoint, binding: AdapterBinding, ranks: list[int], memory: str, name: str) -> PreparedPart:
    laid_out = LaidOut(binding.bind(checkpoint, name=name), components_of(checkpoint))
    size = laid_out.layout.nbytes
    write_sealed(memory, size, functools.partial(write_checked, laid_out, name=name))
    # The checksum is computed from the sealed bytes, which ranks will read and nobody can change any more.
    loaded = described(checkpoint, map_sealed(memory, size))
    return PreparedPart(ranks, memory, size, msgspec.msgpack.encode(laid_out.layout), loaded)


def _bound_memory(file_bytes: int) -> None:
    """Limit this process's memory to its present size plus what an adapter of this file size needs at most."""
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + COPIES * file_bytes + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
