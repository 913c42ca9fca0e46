# SPDX-License-Identifier: Apache-2.0
"""P3: an adapter from its file to usable, against diffusers' two ways with the same file; and what activation and memory cost.

The load has 418 modules in a tree of FLUX's shape with small layers, so modules, not bytes, take each way's time. Ours
reads, hashes, checks, packs and writes into a slot. Ratios use wall-clock time, because ours hashes beside its checks; ratios of CPU time
are printed too. Activation is of an adapter of FLUX.1's real sizes (the model is a shell without weights) against a plain copy of as many
bytes. Stalls of steps and the memory of all processes are those of real ranks and loads (`adapter_stalls`).
"""

import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import nn

from benchmarks import adapter_stalls
from benchmarks.adapters import RANK, block_linears, random_adapter
from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Times, take_pairs, timed
from benchmarks.result import Measured
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint
from diffusion_worker.lora.pipeline_layers import AdapterLayers, HostAdapter, SlotUse
from diffusion_worker.memory.heap import freeze_gc, unfreeze_gc

CPU = torch.device("cpu")
# The modules of a block that are counted in the goal: attention, feed-forward, and the single blocks' two.
TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "net.0.proj",
    "net.2",
    "proj_mlp",
    "proj_out",
)
TARGETS_OF = {
    "speedup_vs_load_lora_adapter": ">= 20",
    "speedup_vs_hotswap": ">= 5",
    "slot_switch_us": "<= 100",
    "activation_vs_copy": ">= 0.8",
    "host_bytes_ratio": "<= 1.1",
    "step_stall_ms": "<= 20",
}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: blocks of each of FLUX's two kinds, switches of slots, and plans for the pairs of loads and of copies."""

    layers: int = 19
    single_layers: int = 38
    switches: int = 200
    plan: Plan = Plan(wanted=9, within_s=90)
    # Each takes some milliseconds.
    copies: Plan = Plan(wanted=40, at_most=200, within_s=60)


TINY = Size(layers=1, single_layers=1, switches=3, plan=TINY_PLAN, copies=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Measure loads of an adapter, its activation, switches of slots, and stalls of steps.

    A ratio compares ours with a baseline that ran right before and after it: loads of diffusers, or a copy of the same bytes. Ratios and
    times are medians, `step_stall_ms` and `host_bytes_ratio` excepted. Sets one torch thread for the process.
    """
    size = TINY if tiny else Size()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pytorch_lora_weights.safetensors"
        modules = _write(file, size)
        # Ranks do so too. A search for garbage among all imports took 0.4 s of a load, in the same load of each pair.
        freeze_gc()
        try:
            first, swapped = _first_loads(file, size), _hotswaps(file, size)
        finally:
            unfreeze_gc()
    stalls, stalled = adapter_stalls.figures(tiny=tiny)
    activations = _activations(size)
    switches = _switches(size)
    figures = {
        "speedup_vs_load_lora_adapter": 1 / first.ratio("s"),
        "speedup_vs_hotswap": 1 / swapped.ratio("s"),
        "slot_switch_us": statistics.median(sample["slot_switch_us"] for sample in switches),
        "activation_vs_copy": 1 / activations.ratio("s"),
        "cpu_speedup_vs_load_lora_adapter": 1 / first.ratio("cpu_s"),
        "cpu_speedup_vs_hotswap": 1 / swapped.ratio("cpu_s"),
        # Into layers that no adapter has named before, which are wrapped on the way.
        "first_speedup_vs_load_lora_adapter": 1 / first.ratio("unwrapped_s", "s"),
        "load_ms": first.ours("s") * 1000,
        "hotswap_ms": swapped.baseline("s") * 1000,
        "modules": float(modules),
    } | stalls
    judged = [first, swapped, activations]
    samples = [sample for pairs in judged for sample in pairs.samples()] + switches + stalled
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS_OF, samples, judged)


def _small(size: Size) -> Any:
    """Build FLUX's blocks, as many as `size` says, with small random layers that are always the same; in evaluation mode."""
    sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    blocks = {"num_layers": size.layers, "num_single_layers": size.single_layers}
    torch.manual_seed(0)
    return FluxTransformer2DModel(axes_dims_rope=(8, 8, 16), **sizes, **blocks).eval().requires_grad_(False)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in block_linears(model).items() if name.endswith(TARGETS)}


def _write(file: Path, size: Size) -> int:
    """Write an adapter of random factors, the same each time, as diffusers saves it; return its number of modules."""
    adapter = random_adapter(_linears(_small(size)), seed=1)
    tensors = {}
    for name, factors in adapter.modules.items():
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors.a, factors.b
    save_file(tensors, file)
    return len(adapter.modules)


def _layers(model: nn.Module, *, slots: int = 2) -> AdapterLayers:
    return AdapterLayers({"transformer": model}, slots=slots, max_rank=RANK, device=CPU)


def _load(layers: AdapterLayers, file: Path, slot: int = 0) -> None:
    checkpoint = read_checkpoint(str(file))
    _activate(layers, slot, layers.pack(checkpoint, name="adapter"))
    assert checkpoint.digest  # A load ends when the file is hashed too.


def _activate(layers: AdapterLayers, slot: int, adapter: HostAdapter) -> None:
    layers.write(slot, adapter)
    layers.fill()


def _first_loads(file: Path, size: Size) -> Pairs:
    """Time our load of the file between two of diffusers' `load_lora_adapter`, into a model without any adapter each.

    Ours is timed twice: into layers that had an adapter before, which is the figure `s`, and into layers that had none, `unwrapped_s`.
    """
    served = _layers(_small(size))
    _load(served, file)

    def theirs() -> Times:
        model = _small(size)
        return timed(lambda: model.load_lora_adapter(str(file), adapter_name="adapter"))

    def ours() -> Times:
        fresh = _layers(_small(size))
        unwrapped = timed(lambda: _load(fresh, file))
        return timed(lambda: _load(served, file, 1)) | {"unwrapped_s": unwrapped["s"]}

    return take_pairs("load_lora_adapter", theirs, ours, by="cpu_s", plan=size.plan)


def _hotswaps(file: Path, size: Size) -> Pairs:
    """Time our load of the file between two hotswaps of diffusers, all into models that have the adapter already.

    Each is the fastest of three in a row, because both are faster when repeated.
    """
    served, model = _layers(_small(size)), _small(size)
    _load(served, file)
    model.load_lora_adapter(str(file), adapter_name="adapter")
    swap = functools.partial(model.load_lora_adapter, str(file), adapter_name="adapter", hotswap=True)
    swap()
    return take_pairs("hotswap", lambda: _fastest(swap), lambda: _fastest(lambda: _load(served, file, 1)), by="cpu_s", plan=size.plan)


def _fastest(run: Callable[[], Any]) -> Times:
    runs = [timed(run) for _ in range(3)]
    return {name: min(one[name] for one in runs) for name in runs[0]}


def _activations(size: Size) -> Pairs:
    """Compare activation, the write of a packed adapter into slot 1, with `copy_` of the same bytes.

    The sizes are FLUX.1's real ones. Both slots are written once beforehand, so no pair pays for a first write.
    """
    with torch.device("meta"):
        shell = FluxTransformer2DModel(num_layers=size.layers, num_single_layers=size.single_layers).to(torch.bfloat16)
    layers = _layers(shell)
    adapter = layers.pack(_of_size(shell), name="adapter")
    source = torch.cat([run.values.reshape(-1) for run in adapter.runs])
    target = torch.empty_like(source)
    for slot in (0, 1):
        _activate(layers, slot, adapter)
    return take_pairs(
        "a copy", lambda: timed(lambda: target.copy_(source)), lambda: timed(lambda: _activate(layers, 1, adapter)), plan=size.copies
    )


def _of_size(shell: nn.Module) -> LoRACheckpoint:
    return random_adapter(_linears(shell), seed=2, dtype=torch.bfloat16)


def _switches(size: Size) -> list[dict[str, float]]:
    """Time how long it takes to enter the rows of a call whose slots and scales differ from those of the call before.

    Each sample is one switch of eight rows over four slots, in microseconds.
    """
    model = _small(size)
    layers, adapter = _layers(model, slots=4), random_adapter(_linears(model), seed=3)
    for slot in range(4):
        _activate(layers, slot, layers.pack(adapter, name="adapter"))
    samples = []
    for number in range(size.switches):
        uses = [[SlotUse((row + number) % 4, 1.0 + number)] for row in range(8)]
        samples.append({"slot_switch_us": timed(functools.partial(_enter, layers, uses))["s"] * 1e6})
    return samples


def _enter(layers: AdapterLayers, uses: list[list[SlotUse]]) -> None:
    with layers.rows(uses):
        pass
