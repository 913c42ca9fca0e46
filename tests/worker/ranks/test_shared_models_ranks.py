# SPDX-License-Identifier: Apache-2.0
"""Two real ranks of which a request's pipeline changes the shared model in the middle: both reach one verdict, and no other image differs.

A rank that acted alone on what its own pipeline did would leave the other in a collective. So some changes are made on one rank only. The
pipeline chooses its change by a word of the prompt. Ticks are sent two ahead, as the server does.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffusion_worker.config import LoadFormat, WorkerConfig
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.ranks.executor import RankExecutor
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.runner.rig import image_of_diffusers, levels_apart, request
from support.worker.process import DIGITS_MODEL
from support.worker.real_ranks import fingerprints, pids_of, ranks

pytestmark = pytest.mark.slow

CHANGING = """
import torch
import torch.distributed as dist
from diffusers import StableDiffusion3Pipeline


def tile(vae):
    vae.tile_latent_min_size, vae.tile_sample_min_size, vae.use_tiling = 4, 8, True


def swallow(pipeline):
    for _ in range(100):
        try:
            tile(pipeline.vae)
        except BaseException:
            pass


CHANGES = {
    "tiling": lambda pipeline: tile(pipeline.vae),
    "block": lambda pipeline: pipeline.transformer.transformer_blocks.__delitem__(1),
    "hook": lambda pipeline: pipeline.transformer.proj_out._forward_hooks.update({1: lambda layer, args, made: 2 * made}),
    "swallowing": swallow,
    "data": lambda pipeline: setattr(pipeline.transformer.proj_out.bias, "data", torch.ones_like(pipeline.transformer.proj_out.bias)),
}


class Changing(StableDiffusion3Pipeline):
    def __call__(self, prompt, *args, **kwargs):
        words = prompt.split()
        here = dist.get_rank() if dist.is_initialized() else 0
        there = next((int(word[4:]) for word in words if word.startswith("rank")), here)

        def act(pipeline, step, timestep, tensors):
            if step == 1 and here == there:
                for word in words:
                    CHANGES.get(word, lambda pipeline: None)(pipeline)
                if "failing" in words:
                    raise RuntimeError("gave up")
            return tensors

        return super().__call__(prompt, *args, callback_on_step_end=act, **kwargs)
"""

CUSTOM: dict[str, Any] = {"load_format": LoadFormat.CUSTOM_PIPELINE, "pipeline": "changing_on_ranks:Changing"}
AHEAD = 2
DEADLINE_S = 600.0
UNEQUAL = "vae.decode: expected the same tiles on all ranks, found others on one of them"


class Outcome(msgspec.Struct):
    """The results of some requests: images by id, and by id why it was made again, and why it failed."""

    images: dict[str, Any] = {}
    replays: dict[str, str] = {}
    failed: dict[str, str] = {}


def changing(words: str, name: str = "changing") -> RequestSpec:
    """Return a request whose pipeline makes the changes named by `words`, on one rank only if its number is among them."""
    return request(name, prompt=f"a red digit seven {words}", steps=4)


def innocents() -> list[RequestSpec]:
    return [request("exact", seed=2, steps=7, exact=True), request("merged", prompt="a blue digit two", seed=3, steps=4)]


@asynccontextmanager
async def changing_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[RankExecutor]:
    """Start two ranks with the pipeline; check at the end that both still live, with equal models as at their start."""
    (folder / "changing_on_ranks.py").write_text(CHANGING)
    monkeypatch.syspath_prepend(str(folder))
    async with ranks(tick_timeout_s=DEADLINE_S, limit_s=840, **CUSTOM, **settings) as executor:
        pids, before = pids_of(executor), await fingerprints(executor)
        yield executor
        assert await fingerprints(executor) == before
        assert (pids_of(executor), executor.loss) == (pids, None)


async def run(executor: RankExecutor, *requests: RequestSpec) -> Outcome:
    """Run requests together to their end, and those again by themselves that the ranks hand back for it, as the server does."""
    outcome, asked, joining = Outcome(), {spec.request_id: spec for spec in requests}, list(requests)
    sent = 0
    for done in range(200):
        while sent < done + AHEAD:
            executor.broadcast_tick(Tick(sent, joining))
            joining, sent = [], sent + 1
        report = await executor.next_report(DEADLINE_S)
        for made in report.done.finished:
            outcome.images[made.request_id] = np.frombuffer(report.frames[made.frame], np.uint8).reshape(made.shape).copy()
        outcome.failed |= {failed.request_id: failed.error.message for failed in report.done.failed}
        outcome.replays |= {replay.request_id: replay.what for replay in report.done.replays}
        joining += [msgspec.structs.replace(asked[replay.request_id], whole=True) for replay in report.done.replays]
        if asked.keys() == outcome.images.keys() | outcome.failed.keys():
            for _ in range(sent - done - 1):
                await executor.next_report(DEADLINE_S)
            return outcome
    raise AssertionError(f"after {sent} ticks the ranks have made only {sorted(outcome.images)}")


async def run_beside_innocents(executor: RankExecutor, alone: Outcome, *requests: RequestSpec) -> Outcome:
    """Run requests beside two that change nothing, whose images have to be those of `alone`; return the outcome without these two."""
    beside = await run(executor, *innocents(), *requests)
    np.testing.assert_array_equal(beside.images.pop("exact"), alone.images["exact"])
    assert levels_apart(beside.images.pop("merged"), alone.images["merged"]) <= 1
    return beside


def of_diffusers(spec: RequestSpec, **config: Any) -> Any:
    """Return the image of the pipeline itself in this process, which counts as rank 0."""
    loaded = load_pipeline(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", **config), torch.float32)
    return image_of_diffusers(loaded, spec)


@pytest.mark.timeout(900)
async def test_changes_by_pipelines_and_an_error_on_any_rank_get_one_verdict_on_both_and_are_seen_in_no_other_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with changing_ranks(tmp_path, monkeypatch) as executor:
        alone = await run(executor, *innocents())
        for words, why in (
            ("tiling", "sets vae.tile_latent_min_size"),
            ("block", "deletes transformer.transformer_blocks[1]"),
            ("swallowing", "sets vae.tile_latent_min_size"),
            ("hook rank1", "changes transformer.proj_out._forward_hooks"),
        ):
            spec = changing(words)
            outcome = await run_beside_innocents(executor, alone, spec)
            assert (outcome.replays, outcome.failed) == ({"changing": why}, {}), words
            assert levels_apart(outcome.images["changing"], of_diffusers(spec, **CUSTOM)) <= 1, words
            # The second rank's change is made there, and the first one has the image.
            assert (levels_apart(outcome.images["changing"], of_diffusers(spec)) > 1) is (words != "hook rank1"), words

        requests = [changing("tiling rank1", "second"), changing("hook rank0", "first"), changing("failing rank1", "failing")]
        outcome = await run_beside_innocents(executor, alone, *requests)
        assert outcome.replays == {"second": "sets vae.tile_latent_min_size", "first": "changes transformer.proj_out._forward_hooks"}
        assert outcome.images.keys() == outcome.replays.keys()
        assert outcome.failed == {"failing": "RuntimeError: gave up"}
        # An error after the change, in the run alone.
        outcome = await run_beside_innocents(executor, alone, changing("tiling failing rank1"))
        assert outcome.replays == {"changing": "sets vae.tile_latent_min_size"}
        assert outcome.failed == {"changing": "RuntimeError: gave up"}


@pytest.mark.timeout(900)
async def test_ranks_that_share_tokens_reach_one_verdict_too_and_with_unequal_tiles_fail_instead_of_waiting_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks check their models after each request too, which finds a change of data that no wrapper sees."""
    async with changing_ranks(tmp_path, monkeypatch, sequence=2, check_sharing=True, vae_tiling=True) as executor:
        alone = await run(executor, *innocents())
        for words, why in (
            ("hook rank1", "changes transformer.proj_out._forward_hooks"),
            ("data", "changes transformer.proj_out.bias"),
            ("data rank1", "changes transformer.proj_out.bias"),
        ):
            outcome = await run_beside_innocents(executor, alone, changing(words))
            assert (outcome.replays, outcome.failed) == ({"changing": why}, {}), words
        outcome = await run_beside_innocents(executor, alone, changing("tiling rank1"))
        assert outcome.replays == {"changing": "sets vae.tile_latent_min_size"}
        assert outcome.failed == {"changing": UNEQUAL}
