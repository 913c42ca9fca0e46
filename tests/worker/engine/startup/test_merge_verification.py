# SPDX-License-Identifier: Apache-2.0
"""The verification of merged calls by an idle worker, over fake ranks: its steps, its verdicts, and their way to ranks and file."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_worker.config import Dtype, VerifyMerging
from diffusion_worker.engine.startup import merge_verification
from diffusion_worker.engine.startup.merge_verdicts import agreed
from diffusion_worker.messages import MergeBasis, MergeVerdict, ModelInfo, ModelMerging
from support.worker.fake_rank_group import WEIGHTS_BYTES, FakeRankGroup
from support.worker.server_edge import DEADLINE_S, Edge

ALONE = ModelMerging(
    "transformer", "Mine", "forward", MergeBasis.ALONE, "Mine has no record that its calls may be merged; not verified yet", True
)
MODEL = ModelInfo("P", "float32", size_multiple=8, weights_bytes=WEIGHTS_BYTES, merging=[ALONE], platform="torch 1")
GOOD = MergeVerdict(component="transformer", model="Mine", method="forward", signature="x", source="s", arguments=["x: float[2]"])
BAD = msgspec.structs.replace(GOOD, arguments=[], problem="merged or split calls differ by 1.0", apart=1.0)


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_verification, "LOOK_S", 0.0)
    monkeypatch.setattr(FakeRankGroup, "merge_verdicts", [[GOOD]])


@asynccontextmanager
async def edge_of(info: ModelInfo = MODEL, **settings: Any) -> AsyncIterator[Edge]:
    edge = Edge(FakeRankGroup(settings.get("ranks", 1)), **settings)
    edge.ranks.model = info
    async with edge.serving(DEADLINE_S):
        yield edge


async def settled(edge: Edge) -> dict[str, Any]:
    """Wait until no call is left to verify, and return the state's entry about merging for the model's only component."""

    async def over() -> bool:
        [told] = (await edge.state())["model"]["merging"]
        return not told["toVerify"]

    # The thread that computes the digest needs the interpreter, too.
    await edge.wait_for(over, pause_s=0.005)
    [told] = (await edge.state())["model"]["merging"]
    return dict(told)


def steps(edge: Edge) -> int:
    return edge.ranks.calls.count("verify_merging")


async def test_an_idle_worker_verifies_in_steps_and_gives_the_verdicts_to_all_ranks_at_once() -> None:
    async with edge_of(ranks=2) as edge:
        told = await settled(edge)
        assert (told["component"], told["model"], told["basis"]) == ("transformer", "Mine", "verified")
        assert edge.ranks.calls.count("use_merging") == 1
        assert steps(edge) == edge.ranks.merge_steps + 1
        assert edge.ranks.used_verdicts == [GOOD]


async def test_no_step_of_a_verification_begins_while_a_request_runs() -> None:
    async with edge_of() as edge:
        edge.ranks.calling.clear()
        edge.ranks.stepping.clear()
        request = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_state(inFlight=1)
        edge.ranks.calling.set()
        before = steps(edge)
        for _ in range(50):
            await asyncio.sleep(0)
        assert steps(edge) <= max(1, before)
        edge.ranks.stepping.set()
        assert (await request).status_code == 200
        assert (await settled(edge))["basis"] == "verified"


async def test_a_problem_on_one_rank_leaves_the_class_alone_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRankGroup, "merge_verdicts", [[GOOD], [BAD]])
    async with edge_of(ranks=2) as edge:
        told = await settled(edge)
        assert (told["basis"], told["why"]) == ("alone", BAD.problem)
        assert edge.ranks.used_verdicts == [BAD]


async def test_a_verdict_is_kept_over_a_restart_for_the_same_weights_precision_and_platform(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "cache").mkdir()
    places = {"cache_dir": str(tmp_path / "cache"), "model": str(tmp_path / "model")}
    for model, made in (
        (MODEL, 4),
        (MODEL, 0),
        (msgspec.structs.replace(MODEL, dtype="bfloat16"), 4),
        (msgspec.structs.replace(MODEL, platform="torch 2"), 4),
    ):
        async with edge_of(model, **places) as edge:
            assert (await settled(edge))["basis"] == "verified"
            assert steps(edge) == made
    async with edge_of(component_dtypes={"vae": Dtype.BFLOAT16}, **places) as edge:
        await settled(edge)
        assert steps(edge) == 4
    (tmp_path / "model" / "model_index.json").write_text("{ }")
    async with edge_of(**places) as edge:
        await settled(edge)
        assert steps(edge) == 4


async def test_the_ranks_of_a_restarted_group_get_the_verdicts_before_they_serve() -> None:
    async with edge_of() as edge:
        await settled(edge)
        edge.ranks.used_verdicts = []
        edge.ranks.lose("rank 0 was ended by SIGKILL")
        await edge.wait_state(generation=2, state="ready")
        assert edge.ranks.used_verdicts == [GOOD]
        assert (await settled(edge))["basis"] == "verified"


async def test_ranks_that_are_lost_by_a_verification_are_not_asked_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = msgspec.structs.replace(GOOD, arguments=[], problem="no request for its verification called it")
    monkeypatch.setattr(FakeRankGroup, "merge_verdicts", [[unknown]])
    async with edge_of() as edge:
        edge.ranks.killers["verify_merging"] = "rank 0 was ended by SIGSEGV"
        told = await settled(edge)
        assert told["basis"] == "alone"
        assert told["why"] == "the ranks were lost during the verification: rank 0 was ended by SIGSEGV"
        assert steps(edge) == 2
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


async def test_a_verification_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = msgspec.structs.replace(GOOD, arguments=[], problem="no request for its verification called it")
    monkeypatch.setattr(FakeRankGroup, "merge_verdicts", [[unknown]])
    monkeypatch.setattr(merge_verification, "LIMIT_S", -1.0)
    async with edge_of() as edge:
        assert (await settled(edge))["why"] == "the verification took longer than -1 s"
        assert steps(edge) == 1


@pytest.mark.parametrize("merging", [[], [msgspec.structs.replace(ALONE, to_verify=False)]])
async def test_ranks_with_nothing_to_verify_are_not_asked(merging: list[ModelMerging]) -> None:
    async with edge_of(msgspec.structs.replace(MODEL, merging=merging), verify_merging=VerifyMerging.NEVER) as edge:
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200
        assert steps(edge) == 0


def test_ranks_agree_on_the_first_problem_or_on_the_arguments_that_all_of_them_saw() -> None:
    other = msgspec.structs.replace(GOOD, arguments=["x: float[2]", "x: float[3]"], apart=0.5)
    assert agreed([[GOOD], [other]]) == [msgspec.structs.replace(other, arguments=["x: float[2]"])]
    assert agreed([[GOOD], [BAD]]) == agreed([[BAD], [GOOD]]) == [BAD]
    assert agreed([[GOOD], []]) == []
    assert agreed([[], [BAD]]) == [BAD]
