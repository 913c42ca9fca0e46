# SPDX-License-Identifier: Apache-2.0
"""P2: a batch whose rows all have adapters of their own, against the same batch without any, and against a call for each row.

The first ratio is measured on blocks of FLUX at a width where a linear layer is bound by its arithmetic. On a CPU the width is 1536, in
one thread and in CPU time, which other processes disturb least. On a GPU it is 3072, for 1024 pixels in bfloat16. The second ratio
is measured on a model so small that a call costs as much as starting its kernels. Beside them stand all rows with one adapter, and peft's
own mixed batch (`adapter_names`). Weights and adapters are random; their values cost no time.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import peft
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Times, take_pairs, timed
from benchmarks.result import Measured
from diffusion_worker.lora.checkpoint import LoRACheckpoint
from diffusion_worker.lora.naming import LoRAFactors
from diffusion_worker.lora.pipeline_layers import AdapterLayers, SlotUse

ROWS = 8
RANK = 16


class Shape(NamedTuple):
    """The size of a FLUX transformer and of its calls: heads, blocks of each kind, tokens of image and text, and calls in a row."""

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


class Size(msgspec.Struct, frozen=True):
    """The size of a run: both models, the plan for pairs that are judged, and the plan for those that are only recorded."""

    wide: Shape
    small: Shape = SMALL
    plan: Plan = Plan(wanted=11, within_s=90)
    record: Plan = Plan(wanted=5, least=3, within_s=60)


TINY = Size(wide=SMALL, plan=TINY_PLAN, record=TINY_PLAN)


@torch.inference_mode()
def measure(*, tiny: bool = False, device: str = "cpu") -> Measured:
    """Compare a batch in which each row has its own adapter with the same batch without adapters, and with one call per row.

    Ratios are throughputs, so 1 means as fast; each is the median over adjacent pairs. All other figures are milliseconds. Limits torch to
    one thread, and leaves it so.
    """
    torch.set_num_threads(1)
    return _measure(torch.device(device), tiny=tiny)


def _measure(device: torch.device, *, tiny: bool) -> Measured:
    size = TINY if tiny else Size(WIDE if device.type == "cpu" else WIDE_GPU)
    wide, small = _wide_ways(size.wide, device), _small_ways(size.small, device)
    take = functools.partial(_pairs, wide, "none", device=device)
    mixed, one, peft_mixed = take("mixed", plan=size.plan), take("one", plan=size.record), take("peft", plan=size.record)
    serial = _pairs(small, "serial", "mixed", device=device, plan=size.plan)
    figures = {
        "throughput_vs_no_lora": 1 / mixed.ratio(),
        "throughput_vs_serial": 1 / serial.ratio(),
        "one_adapter_vs_no_lora": 1 / one.ratio(),
        "peft_vs_no_lora": 1 / peft_mixed.ratio(),
        "throughput_vs_peft": peft_mixed.ratio() / mixed.ratio(),
        "no_lora_ms": mixed.baseline(mixed.by) * 1000,
        "small_mixed_ms": serial.ours(serial.by) * 1000,
    }
    targets = {"throughput_vs_no_lora": ">= 0.90" if device.type == "cpu" else ">= 0.93", "throughput_vs_serial": ">= 3"}
    judged = [mixed, serial]
    samples = [sample for pairs in (*judged, one, peft_mixed) for sample in pairs.samples()]
    return Measured({name: round(value, 4) for name, value in figures.items()}, targets, samples, judged)


def flux(shape: Shape, device: torch.device) -> nn.Module:
    """Build a FLUX transformer with random weights, always the same ones for a shape, in evaluation mode.

    It is float32 on a CPU and bfloat16 on a GPU.
    """
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
    """Return each `nn.Linear` whose path contains `transformer_blocks`, keyed by that path: embedders and output layers are left out."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "transformer_blocks" in name}


def random_adapter(linears: Mapping[str, nn.Linear], *, seed: int, dtype: torch.dtype = torch.float32) -> LoRACheckpoint:
    """Draw normally distributed factors of rank `RANK` for each of `linears`; `seed` determines them and the digest.

    The result is as if read from a file: its module names begin with `transformer.`.
    """
    torch.manual_seed(seed)
    factors = {
        f"transformer.{name}": LoRAFactors(
            (torch.randn(RANK, layer.in_features) / layer.in_features**0.5).to(dtype), torch.randn(layer.out_features, RANK).to(dtype), 1.0
        )
        for name, layer in linears.items()
    }
    return LoRACheckpoint(hashed=lambda: f"sha256:{seed}", size_bytes=0, modules=factors)


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


def _small_ways(shape: Shape, device: torch.device) -> Ways:
    model = flux(shape, device)
    layers = _with_adapters(model, device)
    together, alone = _inputs(shape, ROWS, device), _inputs(shape, 1, device)
    each = [[SlotUse(slot, 1.0)] for slot in range(ROWS)]

    def one_after_the_other() -> None:
        for use in each:
            _call(layers, model, alone, [use], shape.calls)

    return {"mixed": lambda: _call(layers, model, together, each, shape.calls), "serial": one_after_the_other}


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


def _pairs(ways: Ways, baseline: str, ours: str, *, device: torch.device, plan: Plan) -> Pairs:
    """Measure the way named `ours` between two calls of the way named `baseline`; each ran once before.

    They are judged by CPU time on a CPU, and by the clock on a GPU.
    """
    for way in (baseline, ours):
        ways[way]()
    by = "cpu_s" if device.type == "cpu" else "s"
    return take_pairs(f"{ours} and {baseline}", _run(ways[baseline], device), _run(ways[ours], device), by=by, plan=plan)


def _run(way: Callable[[], Any], device: torch.device) -> Callable[[], Times]:
    def finished() -> None:
        way()
        _finish(device)

    def run() -> Times:
        _finish(device)
        return timed(finished)

    return run


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
