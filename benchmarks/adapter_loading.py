# SPDX-License-Identifier: Apache-2.0
"""P3: an adapter from its file to usable, against diffusers' two ways with the same file; and what activation and memory cost.

The load is of 418 modules in a tree of FLUX's shape with small layers, where the time of every way is that of its modules and
not of its bytes; ours reads, hashes, checks, packs and writes into a slot. Its ratios are by the clock on the wall, for ours hashes
beside its checks; those of CPU time are printed too. Activation is of an adapter of
FLUX.1's real sizes (the model is a shell without weights) against a plain copy of as many bytes.
"""

import ctypes
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import nn

from benchmarks.adapters import RANK, block_linears, random_adapter
from benchmarks.result import Measured
from diffusion_worker.lora.adapter_layers import AdapterLayers, SlotUse
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint

ROUNDS = 7
ADAPTERS = 100
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
}


def measure() -> Measured:
    """Ratios of the fastest rounds; microseconds are the median."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pytorch_lora_weights.safetensors"
        modules = _write(file)
        loads = _loads(file)
        kept = _host_bytes(file)
    activations = _activations()
    switches = _switches()
    fastest = {name: min(sample[name] for sample in loads) for name in loads[0]}
    results = {
        "speedup_vs_load_lora_adapter": round(fastest["load_lora_adapter_s"] / fastest["ours_s"], 2),
        "speedup_vs_hotswap": round(fastest["hotswap_s"] / fastest["ours_s"], 2),
        "slot_switch_us": round(statistics.median(sample["slot_switch_us"] for sample in switches), 1),
        "activation_vs_copy": round(min(s["copy_s"] for s in activations) / min(s["activation_s"] for s in activations), 3),
        "host_bytes_ratio": round(kept, 3),
        "cpu_speedup_vs_load_lora_adapter": round(fastest["load_lora_adapter_cpu_s"] / fastest["ours_cpu_s"], 2),
        "cpu_speedup_vs_hotswap": round(fastest["hotswap_cpu_s"] / fastest["ours_cpu_s"], 2),
        # Into layers that no adapter has named before, which are wrapped on the way.
        "first_speedup_vs_load_lora_adapter": round(fastest["load_lora_adapter_s"] / fastest["ours_first_s"], 2),
        "load_ms": round(fastest["ours_s"] * 1000, 2),
        "hotswap_ms": round(fastest["hotswap_s"] * 1000, 2),
        "modules": float(modules),
    }
    return Measured(results=results, targets=TARGETS_OF, samples=loads + activations + switches)


def _small() -> Any:
    """FLUX's blocks, all of them, with small layers."""
    sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    torch.manual_seed(0)
    return FluxTransformer2DModel(axes_dims_rope=(8, 8, 16), **sizes).eval().requires_grad_(False)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in block_linears(model).items() if name.endswith(TARGETS)}


def _write(file: Path) -> int:
    """An adapter as diffusers saves it; returns how many modules it has."""
    adapter = random_adapter(_linears(_small()), seed=1)
    tensors = {}
    for name, factors in adapter.modules.items():
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors.a, factors.b
    save_file(tensors, file)
    return len(adapter.modules)


def _layers(model: nn.Module, *, slots: int = 2) -> AdapterLayers:
    return AdapterLayers({"transformer": model}, slots=slots, max_rank=RANK, device=CPU)


def _load(layers: AdapterLayers, file: Path, slot: int = 0) -> None:
    layers.write(slot, layers.pack(read_checkpoint(str(file)), name="adapter"))


def _loads(file: Path) -> list[dict[str, float]]:
    served = _layers(_small())
    _load(served, file)
    rounds = []
    for number in range(ROUNDS):
        plain, swapped, fresh = _small(), _small(), _layers(_small())
        swapped.load_lora_adapter(str(file), adapter_name="adapter")
        ways: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(_load, served, file, number % 2),
            "ours_first": functools.partial(_load, fresh, file),
            "load_lora_adapter": functools.partial(plain.load_lora_adapter, str(file), adapter_name="adapter"),
            "hotswap": functools.partial(swapped.load_lora_adapter, str(file), adapter_name="adapter", hotswap=True),
        }
        names = list(ways)
        names = names[number % len(names) :] + names[: number % len(names)]
        sample = {key: seconds for name in names for key, seconds in _timed_both(name, ways[name]).items()}
        # Both can be asked for again, and are faster then: what they use is in the processor's caches.
        for name in ("ours", "hotswap", "ours", "hotswap"):
            again = _timed_both(name, ways[name])
            sample |= {key: min(sample[key], seconds) for key, seconds in again.items()}
        rounds.append(sample)
    return rounds


def _host_bytes(file: Path) -> float:
    """Memory of this process for many registered adapters, over the bytes of their files."""
    layers = _layers(_small())
    registered = [layers.pack(read_checkpoint(str(file)), name="warm-up") for _ in range(3)]
    registered.clear()
    before = _resident_bytes()
    registered = [layers.pack(read_checkpoint(str(file)), name=f"adapter{number}") for number in range(ADAPTERS)]
    return (_resident_bytes() - before) / (ADAPTERS * file.stat().st_size)


def _resident_bytes() -> int:
    """What this process holds, after what nobody needs any more went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _activations() -> list[dict[str, float]]:
    """Writing an adapter of FLUX.1's sizes into a slot, and copying as many bytes."""
    with torch.device("meta"):
        shell = FluxTransformer2DModel().to(torch.bfloat16)
    layers = _layers(shell)
    adapter = layers.pack(_of_size(shell), name="adapter")
    source = torch.cat([run.values.reshape(-1) for run in adapter.runs])
    target = torch.empty_like(source)
    for slot in (0, 1):
        layers.write(slot, adapter)
    rounds = []
    for number in range(6 * ROUNDS):
        ways: dict[str, Callable[[], Any]] = {
            "activation_s": functools.partial(layers.write, number % 2, adapter),
            "copy_s": functools.partial(target.copy_, source),
        }
        names = list(ways) if number % 4 < 2 else list(ways)[::-1]
        rounds.append({name: _timed(ways[name]) for name in names})
    return rounds


def _of_size(shell: nn.Module) -> LoRACheckpoint:
    return random_adapter(_linears(shell), seed=2, dtype=torch.bfloat16)


def _switches() -> list[dict[str, float]]:
    """From the adapters of one call to others that no call had before."""
    model = _small()
    layers, adapter = _layers(model, slots=4), random_adapter(_linears(model), seed=3)
    for slot in range(4):
        layers.write(slot, layers.pack(adapter, name="adapter"))
    samples = []
    for number in range(200):
        uses = [[SlotUse((row + number) % 4, 1.0 + number)] for row in range(8)]
        samples.append({"slot_switch_us": _timed(functools.partial(_enter, layers, uses)) * 1e6})
    return samples


def _enter(layers: AdapterLayers, uses: list[list[SlotUse]]) -> None:
    with layers.rows(uses):
        pass


def _timed_both(name: str, run: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {f"{name}_cpu_s": time.process_time() - cpu, f"{name}_s": time.perf_counter() - wall}


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
