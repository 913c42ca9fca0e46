# SPDX-License-Identifier: Apache-2.0
"""Compiled denoisers: the compiled parts, no recompilation for other rows or adapters, and the fallback."""

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_worker.config import Compile, Offload
from diffusion_worker.lora.call_rows import RowsNotSeparable
from diffusion_worker.lora.naming import LoRAFactors
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.loading.compilation import Compilation, regions_of
from diffusion_worker.runner.loading.offloading import Offloading
from diffusion_worker.runner.model_call.call import ModelCall
from support.lora.adapters import layers_of, load, merged, random_factors, run
from support.runner.rig import RunnerRig, levels_apart, request
from support.worker.process import DIGITS

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


class Blocks(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Named(Blocks):
    _repeated_blocks = ("Linear",)


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Provide a function that replaces `torch.compile` for the test by a compiler, which gets each function and no options."""

    def replace(compiler: Callable[..., Any]) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function))

    return replace


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch trace and guard as always, and then run the traced code without a code generator, which would take minutes."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function, fullgraph=True, backend="eager"))
    yield
    torch._dynamo.reset()


def test_the_blocks_that_diffusers_names_are_compiled_or_those_a_list_repeats_or_the_whole() -> None:
    named, listed, single = Named(), Blocks(), Blocks(1)
    assert regions_of(named) == [part for part in named.modules() if isinstance(part, nn.Linear)]
    assert regions_of(listed) == list(listed.blocks)
    assert regions_of(single) == [single]


def test_only_denoisers_are_compiled_and_the_features_say_how() -> None:
    modules = {"transformer": Blocks(), "text_encoder": Blocks()}
    compilation = Compilation(Compile.DEFAULT, modules)
    assert compilation.regions == list(modules["transformer"].blocks)
    assert compilation.features == {"compile": "default (regional, 3 blocks)"}
    assert Compilation(Compile.MAX_AUTOTUNE, {"unet": Blocks(1)}).features == {"compile": "max-autotune (whole)"}
    assert Compilation(Compile.NONE, modules).features == {}


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning_and_the_features_say_why(
    compiled_by: Callable[[Callable[..., Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("no such operation\nand more words")

        return call

    compiled_by(broken)
    model, x = Blocks(), torch.randn(2, 8)
    expected = model(x)
    compilation = Compilation(Compile.DEFAULT, {"transformer": model})
    with caplog.at_level(logging.WARNING):
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert compilation.features == {"compile": "none: compilation failed: Unsupported: no such operation"}
    [said] = [record for record in caplog.records if record.name == "diffusion_worker.runner.loading.compilation"]
    assert said.levelname == "WARNING"
    assert "--compile default: Block cannot be compiled, the model runs uncompiled" in caplog.text


def test_a_call_that_fails_compiled_or_not_is_the_requests_fault_and_nothing_is_given_up(
    compiled_by: Callable[[Callable[..., Any]], None],
) -> None:
    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> Any:
            if x.shape[-1] != 8:
                raise torch._dynamo.exc.TorchRuntimeError("traced with a wrong shape")
            return function(x)

        return call

    compiled_by(failing)
    compilation = Compilation(Compile.DEFAULT, {"transformer": (model := Named())})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 7))
    model(torch.randn(2, 8))
    assert compilation.features == {"compile": "default (regional, 4 blocks)"}


def test_calls_that_must_be_bit_equal_run_as_they_are(compiled_by: Callable[[Callable[..., Any]], None]) -> None:
    compiled_by(lambda function: lambda x: function(x) + 1)
    model, x = Blocks(), torch.randn(2, 8)
    expected = model(x)
    compilation = Compilation(Compile.DEFAULT, {"transformer": model})
    assert not torch.equal(model(x), expected)
    with compilation.off():
        assert torch.equal(model(x), expected)
    assert not torch.equal(model(x), expected)


# --- adapters -----------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module, uses: list[list[tuple[int, float]]], x: torch.Tensor, adapters: list[dict[str, LoRAFactors]]) -> torch.Tensor:
    """Compute the expected output, row by row: merge that row's adapters, scaled, into a copy of the model and run it on the row alone."""
    rows = []
    for row, own in zip(x, uses, strict=True):
        alone = copy.deepcopy(model)
        for number, scale in own:
            merged(alone, adapters[number], scale)
        rows.append(alone(row[None]))
    return torch.cat(rows)


def test_compiled_blocks_have_any_adapters_in_each_row_and_neither_these_nor_slots_compile_anything_again(traced: None) -> None:
    torch.manual_seed(0)
    model = Blocks().eval().requires_grad_(False)
    base, names = copy.deepcopy(model), ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]
    adapters = [random_factors(base, names, rank=rank, seed=rank) for rank in (1, 3, 8, 16)]
    adapters.append(random_factors(base, names[1:], rank=5, seed=9))
    compilation, layers = Compilation(Compile.DEFAULT, {"transformer": model}), layers_of(model, slots=5)
    layers.make_static(compilation.regions)
    for rows in (1, 3):  # the warm-up uses an empty slot
        for uses in ([[] for _ in range(rows)], [[(0, 1.0)]] * rows):
            run(layers, model, torch.randn(rows, 8), uses)

    def check(*uses: list[tuple[int, float]]) -> None:
        x = torch.randn(len(uses), 8)
        torch.testing.assert_close(run(layers, model, x, uses), adapted(base, [*uses], x, adapters), atol=1e-5, rtol=1e-5)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for slot, factors in enumerate(adapters):
            load(layers, slot, factors)
            check([(slot, 1.0)])
        check([], [(3, 0.5)], [(1, 1.0)], [(4, -1.0)])
        check([(0, 1.0), (1, 0.5), (2, 0.2), (4, 2.0)])
        check([(3, 0.5)], [], [(0, 1.0), (1, 1.0), (2, 1.0)], [], [(1, 0.0)])
        layers.clear(1)
        adapters[1] = adapters[2]
        load(layers, 1, adapters[1])
        check([(1, 1.0)], [(3, 1.0)])
    assert compilation.features == {"compile": "default (regional, 3 blocks)"}


@pytest.mark.slow
def test_rows_without_an_adapter_are_not_reached_by_one_that_overflows(traced: None) -> None:
    model = Blocks().eval().requires_grad_(False)
    compilation, layers = Compilation(Compile.DEFAULT, {"transformer": model}), layers_of(model, slots=1)
    layers.make_static(compilation.regions)
    x = torch.randn(2, 8)
    expected = run(layers, model, x, [[], []])
    factors = random_factors(model, ["blocks.0.linear.base"])["blocks.0.linear.base"]
    load(layers, 0, {"blocks.0.linear": LoRAFactors(factors.a * 1e38, factors.b, 1.0)})
    made = run(layers, model, x * 100, [[(0, 1.0)], [(0, 1.0)]])
    assert not made.isfinite().all()
    torch.testing.assert_close(run(layers, model, x, [[(0, 1.0)], []])[1], expected[1])


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Window() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.reshape(-1, 4)).reshape(x.shape)


@pytest.mark.slow
def test_compiled_rows_that_cannot_be_told_apart_have_the_adapters_of_all_or_are_an_error(traced: None) -> None:
    torch.manual_seed(0)
    model = Windowed().eval().requires_grad_(False)
    base, names = copy.deepcopy(model), ["blocks.0.inner", "blocks.1.inner"]
    compilation, layers = Compilation(Compile.DEFAULT, {"transformer": model}), layers_of(model)
    layers.make_static(compilation.regions)
    adapters = [random_factors(base, names, seed=seed) for seed in (1, 2)]
    load(layers, 0, adapters[0])
    load(layers, 1, adapters[1])
    x = torch.randn(2, 3, 4)
    uses = [[(0, 0.5), (1, 1.0)]] * 2
    for mixed in ([[(0, 1.0)], [(1, 1.0)]], [[(0, 1.0)], []]):
        with pytest.raises(RowsNotSeparable, match=r"transformer\.blocks\.0\.inner does not see the rows of a batch"):
            run(layers, model, x, mixed)
    torch.testing.assert_close(run(layers, model, x, uses), adapted(base, uses, x, adapters))
    assert compilation.features == {"compile": "default (regional, 2 blocks)"}


def images_of(rig: RunnerRig, *, count: int, adapters: tuple[int, ...], guidance: float) -> dict[str, Any]:
    uses = [LoRAUse(adapter, 1.0 / len(adapters)) for adapter in adapters]
    specs: list[RequestSpec] = [
        request(f"{index}", seed=index, height=64, width=64, steps=2, guidance_scale=guidance, loras=[] if index % 2 else uses)
        for index in range(count)
    ]
    images, errors = rig.run(*specs)
    assert errors == {}
    return images


@pytest.mark.slow
def test_neither_rows_nor_adapters_that_come_and_go_nor_a_sleep_compile_anything_again(traced: None) -> None:
    plain, rig = RunnerRig(), RunnerRig(compile=Compile.DEFAULT, max_loras=2)
    assert rig.runner.warm_up().features == {"compile": "default (regional, 4 blocks)"}

    def both(count: int, *adapters: int, guidance: float = 4.0) -> None:
        ours = images_of(rig, count=count, adapters=adapters, guidance=guidance)
        theirs = images_of(plain, count=count, adapters=adapters, guidance=guidance)
        assert max(levels_apart(ours[name], theirs[name]) for name in theirs) <= 1

    def change(*, add: tuple[str, int] | None = None, remove: int | None = None) -> None:
        for each in (plain, rig):
            assert each.runner.loras is not None
            if add is not None:
                each.runner.loras.add_adapter(LoRARequest(add[0], add[1], str(DIGITS / "loras" / add[0])))
            if remove is not None:
                assert each.runner.loras.remove_adapter(remove)

    # A recompilation would be an error of torch, and the runner would fall back for good.
    with torch._dynamo.config.patch(error_on_recompile=True):
        both(3)
        both(1, guidance=1.0)
        change(add=("stripes", 1))
        both(1, 1, guidance=1.0)
        change(add=("frame", 2))
        both(1, 1, 2)
        both(3, 2, 1)
        change(remove=1)
        change(add=("paper", 3))
        rig.runner.release()
        rig.runner.restore()
        both(2, 3)
    assert rig.runner.warm_up().features == {"compile": "default (regional, 4 blocks)"}


@pytest.mark.slow
def test_weights_that_come_and_go_compile_nothing_again(traced: None) -> None:
    model, inputs = Blocks().eval().requires_grad_(False), [torch.randn(rows, 8) for rows in (1, 2, 3, 5)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        compilation, offloading = Compilation(Compile.DEFAULT, {"transformer": model}), Offloading(Offload.MODEL, CPU)

        def made(x: torch.Tensor) -> torch.Tensor:
            offloading.send_home()
            result: torch.Tensor = offloading.execute(model, ModelCall("transformer", "forward", {"x": x}, module=model))
            return result

        for x in inputs[:2]:
            made(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert all(torch.allclose(made(x), theirs, atol=1e-6) for x, theirs in zip(inputs, expected, strict=True))
    assert compilation.features == {"compile": "default (regional, 3 blocks)"}


@pytest.mark.slow
def test_a_size_that_cannot_be_compiled_while_serving_is_answered_and_its_tick_tells_the_server(
    compiled_by: Callable[[Callable[..., Any]], None],
) -> None:
    def only_small(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(hidden_states: torch.Tensor, **rest: Any) -> Any:
            if hidden_states.shape[1] > 64:
                raise torch._dynamo.exc.Unsupported("too many tokens")
            return function(hidden_states=hidden_states, **rest)

        return call

    compiled_by(only_small)
    rig = RunnerRig(compile=Compile.DEFAULT)
    told = []
    for spec in (request("small", steps=1), request("large", steps=1, height=128, width=128), request("next", steps=1)):
        output = rig.runner.execute_stepwise(Tick(1, [spec]))
        while not output.images:
            assert output.errors == {}
            told.append(output.features)
            output = rig.runner.execute_stepwise(Tick(1))
        told.append(output.features)
    assert [features for features in told if features is not None] == [
        {"compile": "none: compilation failed: Unsupported: too many tokens"}
    ]


# --- with a code generator --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not any(Path(folder, "g++").exists() for folder in ("/usr/bin", "/usr/local/bin")),
    reason="no g++: what happens then is in test_warm_up.py",
)
def test_generated_code_computes_what_the_blocks_do_for_one_row_and_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Blocks().eval().requires_grad_(False)
    inputs = [torch.randn(rows, 8) for rows in (1, 2, 3, 7)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        compilation = Compilation(Compile.DEFAULT, {"transformer": model})
        made = [model(x) for x in inputs]
    assert compilation.features == {"compile": "default (regional, 3 blocks)"}
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(made, expected, strict=True))
    assert any(tmp_path.rglob("*.so")), "code was generated and compiled"


@pytest.mark.slow
@pytest.mark.skipif(
    not any(Path(folder, "g++").exists() for folder in ("/usr/bin", "/usr/local/bin")), reason="no g++: what is traced is tested above"
)
def test_generated_code_has_any_adapters_in_each_row_and_is_generated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Blocks().eval().requires_grad_(False)
    base, names = copy.deepcopy(model), ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]
    adapters = [random_factors(base, names, rank=rank, seed=rank) for rank in (1, 8, 16)]
    compilation, layers = Compilation(Compile.DEFAULT, {"transformer": model}), layers_of(model, slots=3)
    layers.make_static(compilation.regions)
    for rows in (1, 2):
        run(layers, model, torch.randn(rows, 8), [[(0, 1.0)]] * rows)
    for slot, factors in enumerate(adapters):
        load(layers, slot, factors)
    asked: list[list[list[tuple[int, float]]]] = [
        [[(2, 1.0)]],
        [[(0, 1.0), (1, 0.5), (2, -1.0)]],
        [[(0, 1.0)], [], [(2, 0.5), (1, 1.0)]],
        [[(1, 1.0)], [(2, 1.0)], [(0, 1.0)], [], [(1, 0.3)]],
    ]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for uses in asked:
            x = torch.randn(len(uses), 8)
            torch.testing.assert_close(run(layers, model, x, uses), adapted(base, uses, x, adapters), atol=1e-5, rtol=1e-5)
    assert compilation.features == {"compile": "default (regional, 3 blocks)"}
    torch._dynamo.reset()
