# SPDX-License-Identifier: Apache-2.0
"""P2: a batch whose rows all have adapters of their own, against the same batch without any, and against a call for each row.

The first is measured on blocks of FLUX at a width where a linear layer is bound by its arithmetic (on a CPU 1536, in one thread and
in CPU time, which other processes disturb least; on a GPU 3072, 1024 pixels, bfloat16), the second on a model so small that a
call costs what starting its kernels costs. Beside them: all rows with one adapter, and peft's own mixed batch
(`adapter_names`). Weights and adapters are random; their values cost no time.
"""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import peft
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from benchmarks.result import Measured
from diffusion_worker.lora.adapter_layers import AdapterLayers, SlotUse
from diffusion_worker.lora.checkpoint import LoRACheckpoint, LoRAFactors

ROWS = 8
RANK = 16
ROUNDS = 10
# How far apart the fastest calls of both halves of the baseline may be before the machine counts as too busy.
NOISE = 0.10


class Shape(NamedTuple):
    """The size of a model and of its calls."""

    heads: int
    head_dim: int
    layers: int
    single_layers: int
    tokens: int
    text_tokens: int
    calls: int


WIDE = Shape(heads=12, head_dim=128, layers=1, single_layers=1, tokens=192, text_tokens=64, calls=1)
WIDE_GPU = Shape(heads=24, head_dim=128, layers=2, single_layers=4, tokens=4096, text_tokens=512, calls=2)
SMALL = Shape(heads=2, head_dim=32, layers=2, single_layers=4, tokens=16, text_tokens=8, calls=4)


def measure() -> Measured:
    """Throughputs as ratios of the fastest rounds."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wide = _rounds(_wide_ways(WIDE if device.type == "cpu" else WIDE_GPU, device), device)
    small = _rounds(_small_ways(device), device)
    _require_calm([sample["none"] for sample in wide])
    fastest = {name: min(sample[name] for sample in wide) for name in wide[0]}
    few = {name: min(sample[name] for sample in small) for name in small[0]}
    results = {
        "throughput_vs_no_lora": round(fastest["none"] / fastest["mixed"], 4),
        "throughput_vs_serial": round(few["serial"] / few["mixed"], 3),
        "one_adapter_vs_no_lora": round(fastest["none"] / fastest["one"], 4),
        "peft_vs_no_lora": round(fastest["none"] / fastest["peft"], 4),
        "throughput_vs_peft": round(fastest["peft"] / fastest["mixed"], 3),
        "no_lora_ms": round(fastest["none"] * 1000, 2),
        "small_mixed_ms": round(few["mixed"] * 1000, 3),
    }
    target = ">= 0.90" if device.type == "cpu" else ">= 0.93"
    return Measured(results=results, targets={"throughput_vs_no_lora": target, "throughput_vs_serial": ">= 3"}, samples=wide + small)


def flux(shape: Shape, device: torch.device) -> nn.Module:
    """A FLUX transformer of some blocks with random weights."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=shape.layers,
        num_single_layers=shape.single_layers,
        attention_head_dim=shape.head_dim,
        num_attention_heads=shape.heads,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        in_channels=64,
        axes_dims_rope=(shape.head_dim // 4, shape.head_dim // 4, shape.head_dim // 2),
    )
    made: nn.Module = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16).eval().requires_grad_(False)
    return made


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "transformer_blocks" in name}


def random_adapter(linears: Mapping[str, nn.Linear], *, seed: int, dtype: torch.dtype = torch.float32) -> LoRACheckpoint:
    """An adapter of all these layers."""
    torch.manual_seed(seed)
    factors = {
        f"transformer.{name}": LoRAFactors(
            (torch.randn(RANK, layer.in_features) / layer.in_features**0.5).to(dtype), torch.randn(layer.out_features, RANK).to(dtype), 1.0
        )
        for name, layer in linears.items()
    }
    return LoRACheckpoint(digest=f"sha256:{seed}", size_bytes=0, modules=factors)


Ways = dict[str, Callable[[], Any]]


def _wide_ways(shape: Shape, device: torch.device) -> Ways:
    model = flux(shape, device)
    theirs = _with_peft(copy.deepcopy(model))
    layers = _with_adapters(model, device)
    given = _inputs(shape, ROWS, device)
    each = [[SlotUse(slot, 1.0)] for slot in range(ROWS)]
    names = [f"adapter{number}" for number in range(ROWS)]
    return {
        "none": lambda: _call(layers, model, given, [[]] * ROWS, shape.calls),
        "mixed": lambda: _call(layers, model, given, each, shape.calls),
        "one": lambda: _call(layers, model, given, each[:1] * ROWS, shape.calls),
        "peft": lambda: [theirs(**given, adapter_names=names) for _ in range(shape.calls)],
    }


def _small_ways(device: torch.device) -> Ways:
    model = flux(SMALL, device)
    layers = _with_adapters(model, device)
    together, alone = _inputs(SMALL, ROWS, device), _inputs(SMALL, 1, device)
    each = [[SlotUse(slot, 1.0)] for slot in range(ROWS)]
    return {
        "mixed": lambda: _call(layers, model, together, each, SMALL.calls),
        "serial": lambda: _one_after_the_other(layers, model, alone, each),
    }


def _one_after_the_other(layers: AdapterLayers, model: nn.Module, given: dict[str, Any], each: list[list[SlotUse]]) -> None:
    for use in each:
        _call(layers, model, given, [use], SMALL.calls)


def _with_adapters(model: nn.Module, device: torch.device) -> AdapterLayers:
    linears = block_linears(model)
    layers = AdapterLayers({"transformer": model}, slots=ROWS, max_rank=RANK, device=device)
    for slot in range(ROWS):
        layers.write(slot, layers.pack(random_adapter(linears, seed=slot), name=f"adapter{slot}"))
    return layers


def _with_peft(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(block_linears(model)), init_lora_weights=False)
    made = peft.get_peft_model(model, config, adapter_name="adapter0")
    for number in range(1, ROWS):
        made.add_adapter(f"adapter{number}", config)
    adapted: nn.Module = made.eval()
    return adapted


def _inputs(shape: Shape, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)

    return {
        "hidden_states": noise(rows, shape.tokens, 64),
        "encoder_hidden_states": noise(rows, shape.text_tokens, 64),
        "pooled_projections": noise(rows, 64),
        "timestep": torch.full((rows,), 0.5, device=device),
        "img_ids": torch.zeros(shape.tokens, 3, device=device),
        "txt_ids": torch.zeros(shape.text_tokens, 3, device=device),
    }


def _call(layers: AdapterLayers, model: nn.Module, given: dict[str, Any], uses: list[list[SlotUse]], calls: int) -> None:
    for _ in range(calls):
        with layers.rows(uses):
            model(**given)


@torch.inference_mode()
def _rounds(ways: Ways, device: torch.device) -> list[dict[str, float]]:
    """Every way once in each round, the first one of a round another each time."""
    for run in ways.values():
        run()
    names, rounds = list(ways), []
    for number in range(ROUNDS):
        first = number % len(names)
        rounds.append({name: _timed(ways[name], device) for name in names[first:] + names[:first]})
    return rounds


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    _finish(device)
    start = clock()
    run()
    _finish(device)
    return clock() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _require_calm(seconds: list[float]) -> None:
    halves = min(seconds[: ROUNDS // 2]), min(seconds[ROUNDS // 2 :])
    apart = max(halves) / min(halves) - 1
    if apart > NOISE:
        raise RuntimeError(f"rounds of the baseline differ by {apart:.0%}, more than {NOISE:.0%}: the machine is too busy")
