# SPDX-License-Identifier: Apache-2.0
"""Wrapped linear layers: equal to peft for every row of a call, whatever its adapters and those of its neighbours."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.call_rows import RowsNotSeparable
from diffusion_worker.lora.layers import LoRALinear
from diffusion_worker.lora.naming import LoRAFactors
from support.lora.adapters import checkpoint_of, factors_of, layers_of, load, merged, random_factors, require_rows_as_merged, run, with_peft

TIGHT = {"atol": 1e-5, "rtol": 1e-5}


class Net(nn.Module):
    """A small model of linear layers over rows of tokens, for adapters that name some or all of them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(10, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: torch.Tensor = self.last(x)
        return result


ALL = ("first", "blocks.0", "blocks.1", "last")


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off for a test: its kernels for lower precisions crash on machines that hide some features of their processor."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


# --- equal to peft --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 10), (3, 10), (3, 2, 5, 10)], ids=["tokens", "vectors", "a grid"])
@pytest.mark.parametrize("scale", [1.0, 0.3, -0.5])
def test_all_rows_with_one_adapter_are_what_peft_computes(net: Net, shape: tuple[int, ...], scale: float) -> None:
    factors, x = random_factors(net, ALL, scaling=0.7), torch.randn(*shape)
    expected = with_peft(copy.deepcopy(net), factors, scale)(x)
    layers = layers_of(net)
    load(layers, 2, factors)
    torch.testing.assert_close(run(layers, net, x, [[(2, scale)]] * 3), expected, **TIGHT)


def test_rows_of_different_adapters_and_of_none_share_a_call_and_each_is_its_own(net: Net) -> None:
    adapters = [random_factors(net, ALL, rank=rank, scaling=1 / rank, seed=rank) for rank in (1, 4, 16)]
    x, base = torch.randn(6, 5, 10), copy.deepcopy(net)
    layers = layers_of(net)
    for slot, factors in enumerate(adapters):
        load(layers, slot, factors)
    uses: list[list[tuple[int, float]]] = [[(0, 1.0)], [], [(1, 0.5)], [(2, 2.0)], [], [(1, 1.0)]]
    made = run(layers, net, x, uses)
    for row, use in enumerate(uses):
        alone = with_peft(copy.deepcopy(base), adapters[use[0][0]], use[0][1]) if use else base
        torch.testing.assert_close(made[row : row + 1], alone(x[row : row + 1]), **TIGHT)


def test_several_adapters_of_one_row_add_up_with_their_own_strengths(net: Net) -> None:
    adapters = [random_factors(net, ALL, rank=rank, seed=rank) for rank in (2, 3, 8)]
    x, base = torch.randn(4, 5, 10), copy.deepcopy(net)
    layers = layers_of(net)
    for slot, factors in enumerate(adapters):
        load(layers, slot, factors)
    uses: list[list[tuple[int, float]]] = [[(0, 0.5), (2, -1.0)], [(1, 1.0)], [], [(0, 1.0), (1, 0.2), (2, 0.3)]]
    for chosen in (uses, [uses[3]] * 4):
        require_rows_as_merged(run(layers, net, x, chosen), x, chosen, base=base, adapters=adapters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precisions_stay_within_their_own_rounding(net: Net, dtype: torch.dtype, without_onednn: None) -> None:
    factors, x = random_factors(net, ALL, scaling=0.7), torch.randn(3, 5, 10)
    expected = with_peft(copy.deepcopy(net), factors)(x)
    net.to(dtype)
    layers = layers_of(net)
    load(layers, 0, factors)
    for uses in ([[(0, 1.0)]] * 3, [[(0, 1.0)], [(0, 1.0)], []]):
        made = run(layers, net, x.to(dtype), uses)
        # Ten roundings of values of about 2, each by half a unit of 2^-8 (2^-11).
        torch.testing.assert_close(made[:2].float(), expected[:2], atol=10 * torch.finfo(dtype).eps, rtol=0.02)


def test_under_autocast_adapters_compute_in_its_precision_as_peft_does(net: Net, without_onednn: None) -> None:
    factors, x = random_factors(net, ALL), torch.randn(3, 5, 10)
    theirs = with_peft(copy.deepcopy(net), factors)
    layers = layers_of(net)
    load(layers, 0, factors)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(x)
        for uses in ([[(0, 1.0)]] * 3, [[(0, 1.0)], [(0, 1.0)], []]):
            made = run(layers, net, x, uses)
            assert made.dtype is expected.dtype is torch.bfloat16
            torch.testing.assert_close(made[:2], expected[:2], atol=0.05, rtol=0.05)


def test_a_copy_of_a_model_in_another_precision_has_the_adapters_of_the_original(net: Net) -> None:
    factors, x = random_factors(net, ALL), torch.randn(3, 5, 10)
    layers = layers_of(net, target_modules=["all"])
    other = copy.deepcopy(net).double()
    load(layers, 0, factors)
    uses: list[list[tuple[int, float]]] = [[(0, 1.0)], [], [(0, 0.5)]]
    made = run(layers, other, x.double(), uses)
    assert made.dtype is torch.float64
    torch.testing.assert_close(made.float(), run(layers, net, x, uses), **TIGHT)


def test_ranks_may_differ_from_layer_to_layer_and_layers_that_are_not_named_are_their_base(net: Net) -> None:
    factors = {"first": factors_of(net.first, rank=2, scaling=1.5), "last": factors_of(net.last, rank=9, scaling=0.25)}
    x = torch.randn(2, 5, 10)
    expected = with_peft(copy.deepcopy(net), factors)(x)
    layers = layers_of(net)
    load(layers, 0, factors)
    torch.testing.assert_close(run(layers, net, x, [[(0, 1.0)]] * 2), expected, **TIGHT)
    assert isinstance(net.first, LoRALinear) and isinstance(net.blocks[0], nn.Linear)


# --- the base stays the base ------------------------------------------------------------------------------------------------


def test_strength_zero_rows_without_and_slots_that_were_emptied_are_bit_for_bit_the_base(net: Net) -> None:
    x = torch.randn(4, 5, 10)
    with torch.inference_mode():
        plain = net(x)
    layers = layers_of(net)
    load(layers, 0, random_factors(net, ALL))
    assert torch.equal(run(layers, net, x, [[(0, 0.0)]] * 4), plain)
    mixed = run(layers, net, x, [[], [(0, 1.0)], [(0, 0.0)], [(0, 1.0)]])
    assert torch.equal(mixed[[0, 2]], plain[[0, 2]]) and not torch.allclose(mixed[[1, 3]], plain[[1, 3]])
    layers.clear(0)
    assert torch.equal(run(layers, net, x, [[(0, 1.0)]] * 4), plain)


def test_an_adapter_can_be_packed_in_inference_mode(net: Net) -> None:
    checkpoint = checkpoint_of(random_factors(net, ["last"]))
    with torch.inference_mode():
        packed = layers_of(copy.deepcopy(net)).pack(checkpoint, name="adapter")
    expected = layers_of(net).pack(checkpoint, name="adapter")
    assert torch.equal(packed.kept, expected.kept) and not packed.kept.is_inference()


def test_switching_back_and_forth_gives_the_same_bits_each_time(net: Net) -> None:
    x, first, second = torch.randn(2, 5, 10), random_factors(net, ALL, rank=16), random_factors(net, ("last",), rank=2, seed=1)
    layers = layers_of(net)
    load(layers, 0, first)
    one = run(layers, net, x, [[(0, 1.0)]] * 2)
    load(layers, 0, second)
    other = run(layers, net, x, [[(0, 1.0)]] * 2)
    load(layers, 0, first)
    assert torch.equal(run(layers, net, x, [[(0, 1.0)]] * 2), one)
    load(layers, 0, second)
    assert torch.equal(run(layers, net, x, [[(0, 1.0)]] * 2), other)
    fresh = layers_of(again := Net().eval())
    again.load_state_dict({name.replace(".base", ""): value for name, value in net.state_dict().items()})
    load(fresh, 0, second)
    assert torch.equal(run(fresh, again, x, [[(0, 1.0)]] * 2), other), "nothing of the larger adapter is left"


def test_what_another_adapter_holds_cannot_reach_a_row_that_does_not_use_it(net: Net) -> None:
    huge = {name: LoRAFactors(each.a * 1e38, each.b * 1e38, 1.0) for name, each in random_factors(net, ALL).items()}
    x = torch.randn(3, 5, 10)
    with torch.inference_mode():
        plain = net(x)
    layers = layers_of(net)
    load(layers, 0, huge)
    load(layers, 1, (mine := random_factors(net, ALL, rank=2, seed=1)))
    made = run(layers, net, x, [[(0, 1.0)], [(1, 1.0)], []])
    assert not made[0].isfinite().all()
    assert torch.equal(made[2], plain[2])
    layers.clear(0)
    torch.testing.assert_close(made[1:2], run(layers, net, x[1:2], [[(1, 1.0)]]), **TIGHT)
    assert mine


# --- rows that cannot be separated ----------------------------------------------------------------------------------------


class Folding(nn.Module):
    """A pair of linear layers. The inner one gets the token dimension folded into the batch, so its rows are not those of the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(x)
        result: torch.Tensor = self.inner(x.reshape(-1, 1, 10)).reshape(x.shape)
        return result


def test_folded_rows_with_the_same_adapters_have_them_and_others_are_an_error_that_asks_for_calls_of_their_own() -> None:
    torch.manual_seed(0)
    net = Folding().requires_grad_(False)
    one, two = (random_factors(net, ("outer", "inner"), seed=seed) for seed in (1, 2))
    outer = random_factors(net, ("outer",), seed=3)
    x, base = torch.randn(2, 4, 10), copy.deepcopy(net)
    layers = layers_of(net)
    for slot, factors in enumerate((one, two, outer)):
        load(layers, slot, factors)
    torch.testing.assert_close(run(layers, net, x, [[(0, 0.5)]] * 2), with_peft(copy.deepcopy(base), one, 0.5)(x), **TIGHT)
    both = merged(merged(copy.deepcopy(base), one, 0.5), two)
    torch.testing.assert_close(run(layers, net, x, [[(0, 0.5), (1, 1.0)], [(1, 1.0), (0, 0.5)]]), both(x), **TIGHT)
    for uses in ([[(0, 1.0)], [(1, 1.0)]], [[(0, 1.0)], []], [[(0, 1.0)], [(0, 0.5)]]):
        with pytest.raises(RowsNotSeparable, match="cannot be kept apart"):
            run(layers, net, x, uses)
    made = run(layers, net, x, [[(2, 1.0)], []])
    torch.testing.assert_close(made[:1], with_peft(copy.deepcopy(base), outer)(x[:1]), **TIGHT)
    torch.testing.assert_close(made[1:], base(x[1:]), **TIGHT)


def test_a_folded_layer_is_known_even_when_its_rows_are_as_many_as_the_calls(net: Net) -> None:
    folding = Folding().requires_grad_(False)
    layers = layers_of(folding)
    load(layers, 0, random_factors(folding, ("inner",)))
    with pytest.raises(RowsNotSeparable):
        run(layers, folding, torch.randn(2, 4, 10), [[(0, 1.0)], []])
    with pytest.raises(RowsNotSeparable, match=r"transformer\.inner"):
        run(layers, folding, torch.randn(2, 1, 10), [[(0, 1.0)], []])
    assert run(layers, folding, torch.randn(2, 1, 10), [[], []]).shape == (2, 1, 10)


# --- binding ----------------------------------------------------------------------------------------------------------------


def refusal(net: nn.Module, factors: dict[str, LoRAFactors], **options: Any) -> RequestError:
    layers, before = layers_of(net, **options), [type(part) for part in net.modules()]
    with pytest.raises(RequestError) as refused:
        layers.pack(checkpoint_of(factors), name="mine")
    assert [type(part) for part in net.modules()] == before, "a refused adapter leaves nothing behind"
    return refused.value


def test_an_adapter_of_another_model_is_refused_with_the_first_names(net: Net) -> None:
    factors = {f"other.{number}": factors_of(net.first, rank=2) for number in range(5)}
    error = refusal(net, factors)
    assert error.code is ErrorCode.NO_MATCHING_MODULES
    expected = "adapter 'mine': 5 of 5 modules do not match Net: "
    assert error.message == expected + ", ".join(f"transformer.other.{number} (no such layer)" for number in range(3))


def test_an_adapter_that_fits_in_part_is_refused_whole_with_expected_and_found_shapes(net: Net) -> None:
    error = refusal(net, random_factors(net, ALL) | {"last": factors_of(net.first, rank=2)})
    assert error.code is ErrorCode.INVALID_ADAPTER
    assert "1 of 4 modules do not match Net: transformer.last (expected 24 inputs and 6 outputs, found 10 and 24)" in error.message


def test_a_rank_over_the_limit_is_refused_with_both_numbers_and_what_to_change(net: Net) -> None:
    error = refusal(net, random_factors(net, ALL, rank=5), max_rank=4)
    assert error.code is ErrorCode.RANK_TOO_LARGE
    assert (
        error.message
        == "adapter 'mine': rank 5 is over the limit of 4, first at transformer.first: start the worker with a larger --max-lora-rank"
    )


OTHERS = (nn.Embedding(24, 10), nn.LayerNorm(10), nn.Conv2d(10, 20, 1, groups=2))


@pytest.mark.parametrize("other", OTHERS, ids=lambda part: type(part).__name__)
def test_what_cannot_have_adapters_is_refused_by_name_and_kind(net: Net, other: nn.Module) -> None:
    net.other = other
    error = refusal(net, random_factors(net, ALL) | {"other": factors_of(net.first, rank=2)})
    assert f"transformer.other ({type(other).__name__} cannot have adapters)" in error.message


def test_layers_that_are_read_and_never_called_are_refused() -> None:
    attention = nn.MultiheadAttention(8, 2)
    assert "NonDynamicallyQuantizableLinear" in refusal(attention, {"out_proj": factors_of(attention.out_proj, rank=2)}).message


def test_a_layer_with_two_names_is_wrapped_once_and_takes_either(net: Net) -> None:
    net.alias = net.last
    factors = random_factors(net, ("alias",))
    x, expected = torch.randn(1, 2, 10), None
    layers = layers_of(net, target_modules=["last"])
    assert net.alias is net.last and isinstance(net.last, LoRALinear)
    load(layers, 0, factors)
    made = run(layers, net, x, [[(0, 1.0)]])
    load(layers, 0, {"last": factors["alias"]})
    expected = run(layers, net, x, [[(0, 1.0)]])
    assert torch.equal(made, expected) and not torch.equal(made, net(x))
    with pytest.raises(RequestError, match=r"expected one module for a layer, found several: transformer\.alias, transformer\.last"):
        layers.pack(checkpoint_of({"alias": factors["alias"], "last": factors["alias"]}), name="both")


# --- target modules ---------------------------------------------------------------------------------------------------------


def test_the_target_modules_are_wrapped_at_once_and_no_others_ever(net: Net) -> None:
    layers = layers_of(net, target_modules=["blocks.0", "last"])
    assert [isinstance(net.get_submodule(name), LoRALinear) for name in ALL] == [False, True, False, True]
    with pytest.raises(RequestError) as refused:
        layers.pack(checkpoint_of(random_factors(net, ("first", "last"))), name="mine")
    assert refused.value.code is ErrorCode.MODULES_OUTSIDE_ENVELOPE
    expected = "expected layers of --lora-target-module or spec.lora.targetModules (blocks.0, last), found 1 others: transformer.first"
    assert refused.value.message == f"adapter 'mine': {expected}; add these to the list, or use another adapter"
    load(layers, 0, random_factors(net, ("blocks.0", "last")))
    layers.make_static([net])
    assert not isinstance(net.first, LoRALinear)


def test_all_wraps_everything(net: Net) -> None:
    layers_of(net, target_modules=["all"])
    assert all(isinstance(net.get_submodule(name), LoRALinear) for name in ALL)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("to_q", "--lora-target-module to_q: the model has no layer whose name is this or ends with it"),
        ("irst", "--lora-target-module irst: the model has no layer whose name is this or ends with it"),
        ("norm", "--lora-target-module norm: expected layers that adapters can change, found LayerNorm"),
    ],
)
def test_a_target_that_names_nothing_or_nothing_that_can_be_wrapped_is_refused_at_start(net: Net, target: str, says: str) -> None:
    net.norm = nn.LayerNorm(3)
    with pytest.raises(ConfigError) as refused:
        layers_of(net, target_modules=["last", target])
    assert str(refused.value) == says
