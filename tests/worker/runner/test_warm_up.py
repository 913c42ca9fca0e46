# SPDX-License-Identifier: Apache-2.0
"""The warm-up: all ranks run a request of few steps before the worker is ready, and again after a restart."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from diffusion_worker.config import Dtype, RequestDefaults, RequestLimits, WorkerConfig
from diffusion_worker.engine.state.rank_protocol import TickReport
from diffusion_worker.engine.state.state_document import EngineState, LoadStage
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, RequestError
from diffusion_worker.messages import ErrorReport, LoRAUse, ModelInfo, RequestSpec, RpcReply, Task, Tick, WarmedUp
from diffusion_worker.runner.pipelines.description import with_deployments_size
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.warm_up import Variant, compiled_variants, warm_up, warm_up_requests
from support.runner.rig import RunnerRig
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.process import WorkerProcess
from support.worker.server_edge import Edge

MODEL = ModelInfo(pipeline="P", dtype="float32", size_multiple=8, weights_bytes=1)
WARM_UP_FAILED = "the warm-up before the first request failed: "
FAILED = ErrorReport(ErrorCode.ENGINE_FAILED, "warm-up: generate with 1 steps in 64x64 by P: ValueError: shapes do not match")


def config_of(**change: object) -> WorkerConfig:
    return WorkerConfig(**{"model": "m", "served_name": "m"} | change)  # type: ignore[arg-type]


class Ranks:
    """A stand-in for ranks that keeps the requests and sizes of frames it gets; every request ends in its first tick.

    With `fail` a request of few enough steps fails with this message.
    """

    denoise_s = 0.25

    def __init__(self, *, fail: str | None = None, most_failing_steps: int = 100) -> None:
        self.specs: list[RequestSpec] = []
        self.frames: list[int] = []
        self._fail = fail
        self._most_failing_steps = most_failing_steps

    def execute(self, tick: Tick, frames: Sequence[bytes]) -> StepOutput:
        self.specs += tick.join
        self.frames += map(len, frames)
        if tick.join and self._fail is not None and (tick.join[-1].steps or 0) <= self._most_failing_steps:
            return StepOutput(errors={tick.join[-1].request_id: ErrorReport(ErrorCode.ENGINE_FAILED, self._fail)})
        return StepOutput(images={spec.request_id: None for spec in tick.join}, denoise_seconds=self.denoise_s)


# --- the engine ---------------------------------------------------------------------------------------------------------


async def test_the_worker_is_ready_only_after_the_warm_up_which_its_state_shows() -> None:
    edge = Edge(FakeRankGroup())
    edge.ranks.features = {"compile": "default (regional, 4 blocks)"}
    edge.ranks.calling.clear()
    starting = asyncio.create_task(edge.engine.start())

    async def warming() -> bool:
        return edge.ranks.counts["warm_up"] == 1

    await edge.wait_for(warming)
    document = await edge.state()
    assert (document["state"], document["load"]["stage"], document["features"]) == ("starting", LoadStage.WARMUP, {})
    assert (await edge.data.get("/readyz")).status_code == 503
    edge.ranks.calling.set()
    await starting
    document = await edge.state()
    assert (document["load"]["stage"], document["features"]) == (LoadStage.DONE, edge.ranks.features)
    await edge.engine.terminate()


async def test_a_warm_up_that_fails_stops_the_start_and_says_what_failed() -> None:
    edge = Edge(FakeRankGroup(2), ranks=2)
    edge.ranks.method_errors["warm_up"] = FAILED
    with pytest.raises(
        ConfigError, match=re.escape(f"{WARM_UP_FAILED}{FAILED.code}: {FAILED.message} (--warmup-steps 0 starts without it)")
    ):
        await edge.engine.start()
    assert not edge.engine.loaded
    await edge.engine.terminate()


async def test_a_warm_up_that_fails_with_a_component_of_another_dtype_names_the_option() -> None:
    edge = Edge(FakeRankGroup(), component_dtypes={"vae": Dtype.FLOAT32})
    edge.ranks.method_errors["warm_up"] = FAILED
    says = "starts without it; --dtype vae=float32: the pipeline has to convert what it gives to this component)"
    with pytest.raises(ConfigError, match=re.escape(says)):
        await edge.engine.start()
    await edge.engine.terminate()


async def test_a_size_that_is_none_of_the_models_stops_the_start_by_the_options_name() -> None:
    edge = Edge(FakeRankGroup(), warmup_sizes=[(64, 64), (60, 64)])
    with pytest.raises(ConfigError, match=r"--warmup-size 60x64: size: expected width and height that are multiples of 8, found 60x64"):
        await edge.engine.start()
    assert edge.ranks.counts["warm_up"] == 0
    await edge.engine.terminate()


async def test_without_steps_there_is_no_warm_up_and_the_features_are_those_of_the_load() -> None:
    group = FakeRankGroup()
    group.model = msgspec.structs.replace(group.model, features={"quantization": "int8"})
    edge = Edge(group, warmup_steps=0)
    await edge.engine.start()
    assert (group.counts["warm_up"], (await edge.state())["features"]) == (0, {"quantization": "int8"})
    await edge.engine.terminate()


async def test_ranks_that_are_started_again_are_warmed_up_again_or_the_worker_ends_with_the_reason() -> None:
    edge = Edge(FakeRankGroup())
    await edge.engine.start()
    edge.ranks.lose("rank 0 (pid 1) was killed by SIGKILL", Fault.DIED)
    await edge.wait_state(generation=2, state=EngineState.READY)
    assert edge.ranks.counts["warm_up"] == 2
    edge.ranks.method_errors["warm_up"] = FAILED
    edge.ranks.lose("rank 0 (pid 1) was killed by SIGKILL", Fault.DIED)
    reason = await edge.engine.run_until_failure()
    assert "cannot be started again: the warm-up before the first request failed" in reason and FAILED.message in reason
    await edge.engine.terminate()


async def test_what_a_single_rank_says_of_an_option_is_told_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge(FakeRankGroup(3), ranks=3)
    replies = [_reply(0, "default"), _reply(1, "default"), _reply(2, "none: compilation failed: x")]
    monkeypatch.setattr(edge.ranks, "_replies", lambda *_: replies)
    await edge.engine.start()
    assert (await edge.state())["features"] == {"compile": "rank 2: none: compilation failed: x"}
    monkeypatch.undo()
    await edge.engine.terminate()


class FallsBack(FakeRankGroup):
    """A fake rank group whose compilation fell back: all its reports carry the feature `compile` with a reason."""

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        report = await super().next_report(timeout_s, phase=phase)
        return TickReport(msgspec.structs.replace(report.done, features={"compile": "none: compilation failed: x"}), report.frames)


async def test_what_becomes_of_an_option_while_requests_run_is_in_the_state_document() -> None:
    edge = Edge(FallsBack())
    edge.ranks.features = {"compile": "default (regional, 4 blocks)"}
    await edge.engine.start()
    assert (await edge.state())["features"] == edge.ranks.features
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200
    assert (await edge.state())["features"] == {"compile": "none: compilation failed: x"}
    await edge.engine.terminate()


# --- one rank -----------------------------------------------------------------------------------------------------------


def test_every_size_is_warmed_up_with_the_steps_that_the_options_say() -> None:
    ranks = Ranks()
    warm_up(config_of(warmup_steps=3, warmup_sizes=[(64, 32), (128, 128)]), MODEL, ranks.execute)
    assert [(spec.width, spec.height, spec.steps, spec.task) for spec in ranks.specs] == [
        (64, 32, 3, "generate"),
        (128, 128, 3, "generate"),
    ]
    ranks = Ranks()
    warm_up(config_of(), MODEL, ranks.execute)
    assert [(spec.width, spec.height, spec.steps) for spec in ranks.specs] == [(None, None, 1)]
    ranks = Ranks()
    warm_up(config_of(defaults=RequestDefaults(width=48, height=32)), MODEL, ranks.execute)
    assert [(spec.width, spec.height) for spec in ranks.specs] == [(48, 32)]


@pytest.mark.parametrize(
    ("tasks", "defaults", "size"),
    [
        ([Task.GENERATE, Task.EDIT], {}, (1024, 768)),
        ([Task.GENERATE], {"width": 64, "height": 32}, (64, 32)),
        ([Task.EDIT], {}, (96, 96)),
        ([Task.EDIT], {"width": 64, "height": 32}, (64, 32)),
    ],
)
def test_sizes_that_the_worker_chooses_itself_keep_the_deployments_default_and_limit(
    tasks: list[Task], defaults: dict[str, int], size: tuple[int, int]
) -> None:
    model = msgspec.structs.replace(MODEL, tasks=tasks, default_width=1024, default_height=768, token_pixels=16, tokens_multiple=2)
    found = with_deployments_size(model, RequestDefaults(**defaults), RequestLimits(max_pixels=10_000))
    assert (found.default_width, found.default_height) == size


def test_the_warm_up_measures_the_step_and_the_longest_tick_of_every_size_and_variant() -> None:
    ticks = warm_up(config_of(warmup_sizes=[(64, 32), (128, 128)]), MODEL, Ranks().execute, variants=[Variant(1), Variant(2)])
    assert [(tick.spec.width, tick.spec.height, tick.images, tick.step_s) for tick in ticks] == [
        (64, 32, 1, 0.25),
        (64, 32, 2, 0.25),
        (128, 128, 1, 0.25),
        (128, 128, 2, 0.25),
    ]
    assert all(0 < tick.longest_s < 60 for tick in ticks)


class Changing(Ranks):
    """A stand-in for ranks that sends a request back, because it would change the model, unless the request runs as a whole."""

    def execute(self, tick: Tick, frames: Sequence[bytes]) -> StepOutput:
        if tick.join and not tick.join[0].whole:
            return StepOutput(replays={spec.request_id: "calls vae.enable_tiling()" for spec in tick.join})
        return super().execute(tick, frames)


def test_a_pipeline_that_changes_its_modules_is_found_out_in_the_warm_up() -> None:
    [tick] = warm_up(config_of(), MODEL, Changing().execute)
    assert (tick.spec.whole, tick.replayed) == (True, "calls vae.enable_tiling()")
    [tick] = warm_up(config_of(), MODEL, Ranks().execute)
    assert (tick.spec.whole, tick.replayed) == (False, "")


def test_a_model_whose_denoiser_was_not_seen_is_measured_by_its_whole_tick() -> None:
    ranks = Ranks()
    ranks.denoise_s = 0.0
    [tick] = warm_up(config_of(), MODEL, ranks.execute)
    assert tick.step_s == tick.longest_s > 0


@pytest.mark.parametrize(("task", "frames"), [(Task.EDIT, [64 * 48 * 3]), (Task.INPAINT, [64 * 48 * 3, 64 * 48])])
def test_a_model_that_makes_nothing_of_words_alone_gets_a_grey_image(task: Task, frames: list[int]) -> None:
    model = msgspec.structs.replace(MODEL, tasks=[task], default_width=64, default_height=48)
    [request] = warm_up_requests(config_of(), model)
    assert [len(frame) for frame in request.frames] == frames
    assert set(request.frames[0]) == {128}
    ranks = Ranks()
    warm_up(config_of(), model, ranks.execute, variants=[Variant(2)])
    assert ([spec.task for spec in ranks.specs], ranks.frames) == ([task, task], frames * 2)


def test_a_pipeline_to_which_one_step_is_none_is_warmed_up_by_two() -> None:
    ranks = Ranks(fail="ZeroDivisionError: float division by zero", most_failing_steps=1)
    warm_up(config_of(), MODEL, ranks.execute)
    assert [spec.steps for spec in ranks.specs] == [1, 2]


def test_a_request_that_fails_is_told_with_its_size_and_the_model() -> None:
    with pytest.raises(RequestError, match="warm-up: generate with 2 steps in 64x64 by P: IndexError: no such layer"):
        warm_up(config_of(warmup_sizes=[(64, 64)]), MODEL, Ranks(fail="IndexError: no such layer").execute)
    with pytest.raises(RequestError, match="warm-up: generate with 2 steps in the default size by P: "):
        warm_up(config_of(), MODEL, Ranks(fail="IndexError: no such layer").execute)


class Guided:
    def __call__(self, prompt: str, guidance_scale: float = 7.0) -> None: ...


def test_what_is_compiled_is_warmed_up_for_one_row_and_for_more_and_with_an_adapter() -> None:
    without = compiled_variants(Guided(), Task.GENERATE, most_images=8, ranks=1, adapter=None)
    assert [(variant.images, variant.changes) for variant in without] == [(1, {}), (1, {"guidance_scale": 1.0}), (2, {})]
    both = compiled_variants(Guided(), Task.GENERATE, most_images=8, ranks=1, adapter=-1)
    assert both[:3] == without
    assert [variant.changes["loras"] for variant in both[3:]] == [[LoRAUse(-1, 1.0)]] * 3
    alone = compiled_variants(Guided(), Task.GENERATE, most_images=1, ranks=1, adapter=None)
    spread = compiled_variants(Guided(), Task.GENERATE, most_images=8, ranks=3, adapter=None)
    # Each rank must get more than one row.
    assert ([variant.images for variant in alone], [variant.images for variant in spread]) == ([1, 1], [1, 1, 6])


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["auto", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"])
def test_the_warm_up_calls_every_model_and_leaves_nothing_behind(pipeline: str) -> None:
    rig = RunnerRig(pipeline=pipeline)
    empty = rig.runner.get_prompt_embed_cache_stats()
    rig.runner.warm_up()
    assert {call.component for call in rig.parallel.calls} == {"text_encoder", "text_encoder_2", "transformer", "vae"}
    assert rig.runner.get_prompt_embed_cache_stats() == empty and not any(empty[name] for name in ("size", "hits", "misses"))
    assert rig.runner.loras is not None and rig.runner.loras.list_adapters() == []
    assert rig.runner.execute_stepwise(Tick(1)).images == {}


# --- real processes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_ranks_on_a_machine_without_a_compiler_are_warm_before_they_are_ready_and_again_after_one_is_killed(tmp_path: Path) -> None:
    # The worker's container image has no g++ either.
    env = {"PATH": str(tmp_path), "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    options = ("--compile=default", "--max-loras=0", "--warmup-steps=2", "--warmup-size=64x64", "--warmup-size=32x32")
    with WorkerProcess(ranks=2, options=options, env=env) as worker:
        worker.wait_ready()
        before = worker.state()
        assert worker.output.count("warmed up steps=2") == 1
        assert (before["load"]["stage"], before["inFlight"], before["lastRequestAgeSeconds"]) == ("Done", 0, None)
        assert 'route="/v1/images/generations"' not in worker.get("/metrics").text
        assert before["features"]["compile"].startswith("none: compilation failed: "), before["features"]
        assert worker.output.count("--compile default: JointTransformerBlock cannot be compiled") == 2
        assert worker.image(prompt="a red digit seven", seed=1, num_inference_steps=2).size == (64, 64)
        os.kill(worker.rank_pids()[1], signal.SIGKILL)
        worker.wait_for(lambda: worker.state()["restarts"] == 1, what="a new generation")
        worker.wait_state("ready")
        assert worker.output.count("warmed up steps=2") == 2


# --- parts --------------------------------------------------------------------------------------------------------------


def _reply(rank: int, words: str) -> RpcReply:
    return RpcReply(1, rank, msgspec.msgpack.encode(WarmedUp({"compile": words})))
