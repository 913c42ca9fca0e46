# SPDX-License-Identifier: Apache-2.0
"""Adapters on convolutions and on fused projections: equal to peft, or to the weight with the update added."""

import copy
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from diffusion_worker.errors import RequestError
from diffusion_worker.lora.convolution import LoRAConvolution
from diffusion_worker.lora.layers import LoRALinear
from diffusion_worker.lora.naming import LoRAFactors
from diffusion_worker.lora.pipeline_layers import AdapterLayers
from support.lora.adapters import checkpoint_of, factors_of, layers_of, load, merged, random_factors, require_rows_as_merged, run, with_peft

TIGHT = {"atol": 1e-5, "rtol": 1e-5}
CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "one dimension": (nn.Conv1d(6, 5, 3, padding=1), (9,)),
    "a plain one": (nn.Conv2d(6, 5, 3, padding=1), (7, 8)),
    "strides": (nn.Conv2d(6, 5, 3, stride=2, padding=1), (7, 8)),
    "one point": (nn.Conv2d(6, 5, 1), (7, 8)),
    "other padding": (nn.Conv2d(6, 5, 3, padding=1, padding_mode="replicate"), (7, 8)),
    "by name": (nn.Conv2d(6, 5, 3, padding="same"), (7, 8)),
    "three dimensions": (nn.Conv3d(6, 5, (1, 3, 3), padding=(0, 1, 1)), (4, 5, 6)),
}
MIXED: list[list[tuple[int, float]]] = [[(0, 1.0)], [], [(1, 0.5)], [(0, 0.3), (1, -1.0)]]


def compare(model: nn.Module, adapters: list[dict[str, LoRAFactors]], x: torch.Tensor, base: nn.Module, layers: AdapterLayers) -> None:
    """Load the adapters, and assert that rows with mixed, equal or no adapters equal the base with the same adapters in its weights."""
    for slot, factors in enumerate(adapters):
        load(layers, slot, factors)
    for uses in (MIXED, [MIXED[3]] * 4, [MIXED[0]] * 4):
        require_rows_as_merged(run(layers, model, x, uses), x, uses, base=base, adapters=adapters)


# --- convolutions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_with_an_adapter_is_what_its_weight_with_the_update_computes(kind: str) -> None:
    torch.manual_seed(0)
    convolution, size = CONVOLUTIONS[kind]
    model = nn.Sequential(copy.deepcopy(convolution)).requires_grad_(False)
    base = copy.deepcopy(model)
    adapters = [random_factors(base, ["0"], rank=rank, scaling=0.5, seed=rank) for rank in (3, 8)]
    compare(model, adapters, torch.randn(4, 6, *size), base, layers_of(model))
    assert isinstance(model[0], LoRAConvolution)
    # Pipelines look at these.
    assert (model[0].in_channels, model[0].out_channels, model[0].weight.shape) == (6, 5, convolution.weight.shape)


@pytest.mark.parametrize("kind", [kind for kind in CONVOLUTIONS if kind != "other padding"])  # whose A peft pads with zeros
def test_a_convolution_with_an_adapter_is_what_peft_computes(kind: str) -> None:
    torch.manual_seed(0)
    convolution, size = CONVOLUTIONS[kind]
    model = nn.Sequential(copy.deepcopy(convolution)).requires_grad_(False)
    factors, x = random_factors(model, ["0"], scaling=2.0), torch.randn(2, 6, *size)
    expected = with_peft(copy.deepcopy(model), factors, 0.5)(x)
    layers = layers_of(model)
    load(layers, 1, factors)
    torch.testing.assert_close(run(layers, model, x, [[(1, 0.5)]] * 2), expected, **TIGHT)


def test_rows_in_another_memory_format_are_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 5, 3, padding=1)).requires_grad_(False).to(memory_format=torch.channels_last)
    base = copy.deepcopy(model)
    adapters = [random_factors(base, ["0"], seed=seed) for seed in (1, 2)]
    compare(model, adapters, torch.randn(4, 6, 7, 8).to(memory_format=torch.channels_last), base, layers_of(model))


def test_a_point_convolution_and_a_linear_layer_take_each_others_factors() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(6, 5), "point": nn.Conv2d(6, 5, 1)})
    layers = layers_of(model)
    layers.pack(checkpoint_of({"linear": factors_of(model["point"], rank=2), "point": factors_of(model["linear"], rank=2)}), name="both")
    assert isinstance(model["linear"], LoRALinear) and isinstance(model["point"], LoRAConvolution)
    wide = {"point": factors_of(nn.Conv2d(6, 5, 3), rank=2)}
    with pytest.raises(RequestError, match=r"transformer\.point \(expected 6 x 1 x 1 inputs and 5 outputs, found 6 x 3 x 3 and 5\)"):
        layers.pack(checkpoint_of(wide), name="wide")


# --- fused projections ------------------------------------------------------------------------------------------------------


class Attended(nn.Module):
    """A module around diffusers' attention with separate projections; `fused` returns a copy with fused ones."""

    def __init__(self, *, cross: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__()
        self.attn = Attention(query_dim=16, heads=4, dim_head=4, cross_attention_dim=cross, kv_heads=kv_heads)
        self.text = torch.randn(1, 3, cross) if cross else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = None if self.text is None else self.text.expand(x.shape[0], -1, -1)
        result: torch.Tensor = self.attn(x, encoder_hidden_states=text)
        return result

    def fused(self) -> "Attended":
        from diffusers.models.attention_processor import FusedAttnProcessor2_0

        made = copy.deepcopy(self)
        made.attn.fuse_projections()
        made.attn.set_processor(FusedAttnProcessor2_0())
        return made


@pytest.fixture(params=[None, 12], ids=["q, k and v", "k and v"])
def attended(request: pytest.FixtureRequest) -> Attended:
    torch.manual_seed(0)
    return Attended(cross=request.param).eval().requires_grad_(False)


@pytest.mark.parametrize("missing", [(), ("to_k",), ("to_q", "to_v")], ids=["all", "no k", "k only"])
def test_adapters_of_separate_projections_bind_to_the_parts_of_a_fused_one(attended: Attended, missing: tuple[str, ...]) -> None:
    names = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0") if name not in missing]
    adapters = [random_factors(attended, names, rank=rank, scaling=0.7, seed=rank) for rank in (2, 5)]
    fused = attended.fused()
    compare(fused, adapters, torch.randn(4, 5, 16), attended, layers_of(fused))
    [name] = [name for name in ("to_qkv", "to_kv") if hasattr(fused.attn, name)]
    wrapped = getattr(fused.attn, name)
    assert isinstance(wrapped, LoRALinear) and len(wrapped.parts) == (3 if name == "to_qkv" else 2)
    assert isinstance(fused.attn.to_k, nn.Linear), "what nobody calls stays as it is"


def test_an_adapter_of_a_fused_projection_is_split_over_the_separate_ones(attended: Attended) -> None:
    fused = attended.fused()
    [name] = [name for name in ("to_qkv", "to_kv") if hasattr(fused.attn, name)]
    adapters = [random_factors(fused, [f"attn.{name}"], rank=rank, seed=rank) for rank in (2, 5)]
    base = copy.deepcopy(fused)
    compare(attended, adapters, torch.randn(4, 5, 16), base, layers_of(attended))
    again = attended = base
    compare(again, adapters, torch.randn(4, 5, 16), copy.deepcopy(attended), layers_of(again))


def test_an_adapter_of_a_fused_projection_with_other_sizes_is_refused(attended: Attended) -> None:
    name = "attn.to_kv" if attended.text is not None else "attn.to_qkv"
    factors = {name: LoRAFactors(torch.randn(2, 16 if attended.text is None else 12), torch.randn(40, 2), 1.0)}
    with pytest.raises(RequestError, match=f"transformer.{name} .expected 1[26] inputs and (48|32) outputs, found 1[26] and 40"):
        layers_of(attended).pack(checkpoint_of(factors), name="wide")


def test_parts_of_unequal_size_are_those_of_the_separate_layers_or_of_the_attention() -> None:
    torch.manual_seed(0)
    model = Attended(kv_heads=2).eval().requires_grad_(False)
    names = ["attn.to_q", "attn.to_k", "attn.to_v"]
    factors = random_factors(model, names)
    fused = copy.deepcopy(model)
    fused.attn.fuse_projections()
    layers = layers_of(fused)
    load(layers, 0, factors)
    expected = merged(copy.deepcopy(model), factors)
    together = torch.cat([expected.get_submodule(name).weight for name in names])
    # The output for unit vectors is the weight with the adapter's update.
    answers = run(layers, fused.attn.to_qkv, torch.eye(16).unsqueeze(0), [[(0, 1.0)]])
    torch.testing.assert_close(answers[0].T, together, **TIGHT)
    own: Any = fused.attn
    for name in ("to_q", "to_k", "to_v"):
        delattr(own, name)
    own.to_qkv = own.to_qkv.base
    assert [layer.outputs for _, layer in layers_of(fused)._model if layer.name.endswith("to_qkv")] == [(16, 8, 8)]
