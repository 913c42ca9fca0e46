# SPDX-License-Identifier: Apache-2.0
"""A small sample of `make soak`, with fixed seeds: generated requests, wrong ones, aborted ones, and ranks that die meanwhile."""

import base64
import io
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.soak.adapters import AdapterSoak, References, Spell, run_adapters
from support.soak.edge import NO_HUB, EdgeSoak
from support.soak.frame import Asked, Outcome
from support.soak.sleep import run_sleep
from support.soak.sleep_judge import Excuse, Times, why_wrong
from support.soak.traffic import BAD, pool, run_both, traffic
from support.worker.leftovers import footprint, left_over
from support.worker.process import FAKE_PROGRAM, WorkerProcess
from support.worker.start_signals import run_signals


def test_traffic_is_the_same_from_the_same_seed_and_has_all_kinds() -> None:
    bodies = pool(1, 20, most_steps=5)
    one, again, other = (traffic(seed, 300, bodies, bad=0.1, aborted=0.1) for seed in (1, 1, 2))
    assert one == again != other
    assert {request.expected for request in one} == {200, *(status for _, status in BAD)}
    assert any(request.gone_after_s is not None for request in one)


@pytest.mark.slow
def test_generated_requests_leave_nothing_behind_and_killed_ranks_cost_no_image(short_path: Path) -> None:
    soak, killed = run_both(short_path, seed=1, requests=30, kill_requests=12, kill_every_s=4.0, limit_s=60, images=8)
    assert (soak.wrong, killed.wrong) == ([], [])
    assert soak.answered > 10 and soak.refused_as_they_should > 0
    assert killed.answered > 5 and killed.restarts > 0


@pytest.mark.slow
def test_a_signal_at_any_moment_of_a_start_ends_the_worker(short_path: Path) -> None:
    outcome = run_signals(short_path, seed=1, count=10, limit_s=600)
    assert outcome.wrong == []
    assert outcome.done == 10


@pytest.mark.slow
def test_schemathesis_finds_nothing_at_either_port_and_rude_clients_leave_nothing_behind(tmp_path: Path) -> None:
    with WorkerProcess(program=FAKE_PROGRAM, options=("--max-steps=12", "--max-pixels=16384"), env=NO_HUB) as worker:
        worker.wait_ready()
        worker.request_images(prompt="p kumquatfen")
        before = footprint(worker)
        soak = EdgeSoak(worker, tmp_path, seed=1, examples=12, options=["--phases=fuzzing"])
        soak.run_round(rude=40)
        outcome = soak.outcome
        outcome.wrong += left_over(worker, before)
        soak.run_drain()
        assert "Traceback" not in worker.output
    assert outcome.wrong == []
    assert outcome.data_requests >= 40 and outcome.control_requests >= 10


@pytest.mark.slow
def test_requests_over_changing_adapters_get_the_images_of_theirs(short_path: Path) -> None:
    outcome = run_adapters(short_path, seed=1, count=36, limit_s=600, names=20)
    assert outcome.wrong == []
    assert sum(outcome.images.values()) > 15 and len(outcome.images) == 4
    assert outcome.evictions > 5 and len(outcome.churn) == 3


@pytest.mark.slow
def test_random_sequences_of_sleep_wake_requests_changes_and_kills_lose_no_request(short_path: Path) -> None:
    outcome = run_sleep(short_path, seed=1, count=5, limit_s=600)
    assert outcome.wrong == []
    assert outcome.done == 5
    assert outcome.images > 5 and outcome.states["ready"] > 1
    # An operation is named by its kind and level, and by its code if it failed.
    assert "sleep" in {operation.partition(" ")[0] for operation in outcome.operations}


def test_an_image_of_another_adapter_is_seen_by_its_digest_and_by_its_pixels(tmp_path: Path) -> None:
    soak, digests = _soak_of_two(tmp_path)
    soak.judge(_asked(200, _answer("style-0", digests[0], 10)))
    assert soak.outcome.wrong == []
    soak.judge(_asked(200, _answer("style-0", digests[1], 200)))
    soak.judge(_asked(200, _answer("style-0", digests[0], 200)))
    soak.judge(_asked(404, {"code": "NotFound"}))
    assert [("made with [1]" in text, "image of [(0, (1,))]" in text, "NotFound" in text) for text in soak.outcome.wrong] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_a_name_may_be_what_it_was_or_became_while_its_image_was_made(tmp_path: Path) -> None:
    soak, digests = _soak_of_two(tmp_path)
    soak.spells["style-0"] = [Spell(0, 0.0, ends=5.0), Spell(1, 4.0, ends=8.0), Spell(None, 7.0)]
    for begun, content, right in [(4.5, 0, True), (4.5, 1, True), (6.0, 0, False), (6.0, 1, True), (9.0, 1, False)]:
        soak.outcome.wrong.clear()
        soak.judge(_asked(200, _answer("style-0", digests[content], (10, 200)[content]), begun=begun, ended=float("inf")))
        assert (soak.outcome.wrong == []) is right, (begun, content)


def _soak_of_two(folder: Path) -> tuple[AdapterSoak, list[str]]:
    """Return a soak without a worker, and its digests. `style-0` stands for content 0, whose image is all 10; content 1 gives all 200."""
    contents = [folder / str(number) for number in range(2)]
    for number, content in enumerate(contents):
        content.mkdir()
        (content / "adapter_model.safetensors").write_bytes(bytes([number]))
    soak = AdapterSoak(None, contents, seed=1)
    soak.spells["style-0"] = [Spell(0, 0.0)]
    soak.alone[0, (0,)], soak.alone[0, (1,)] = np.full((8, 8, 3), 10), np.full((8, 8, 3), 200)
    return soak, list(soak.digests)


def _answer(name: str, digest: str, level: int) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(out, "PNG")
    return {
        "data": [{"b64_json": base64.b64encode(out.getvalue()).decode(), "provenance": {"adapters": [{"name": name, "digest": digest}]}}]
    }


def test_a_request_of_the_soak_of_sleep_has_its_image_or_an_error_that_something_excuses() -> None:
    judged, times, answer = *_judge_of_sleep(), _answer("style-0", "sha256:0", 10)
    asleep, lost, nothing = {"code": "Asleep"}, {"code": "RankFailed"}, {}
    assert judged(_asked(200, answer), times) is None
    assert "levels off" in str(judged(_asked(200, _answer("style-0", "sha256:0", 200)), times))
    assert "made with [-1]" in str(judged(_asked(200, _answer("style-0", "sha256:1", 10)), times))
    for document in (asleep, lost, nothing, {"code": "Busy"}, {"code": "model_not_found"}, {"code": "Overloaded"}):
        assert "expected 200" in str(judged(_asked(503, document), times)), document
    times.begin(Excuse.ASKED)
    assert judged(_asked(503, asleep), times) is None and judged(_asked(500, lost), times)
    times.end(Excuse.ASKED)
    times.begin(Excuse.KILLED)
    later = time.monotonic() + 1.0
    assert judged(_asked(503, asleep, begun=later), times) and judged(_asked(500, lost, begun=later), times) is None


def test_a_wrong_request_of_the_soak_of_sleep_is_refused_at_once_or_that_is_wrong() -> None:
    judged, times = _judge_of_sleep()
    late = Asked(None, [], 0.0, expected=400, ended=30.0, status=400, code="InvalidRequest")
    for asked, right in [(replace(late, ended=1.0), True), (late, False), (replace(late, ended=1.0, status=503), False)]:
        assert (judged(asked, times) is None) is right


def _judge_of_sleep() -> tuple[Callable[[Asked, Times], str | None], Times]:
    """Return a judge that knows one image, all 10, for body 0 with content 0 of `style-0`.

    With it comes an empty list of excuses for the test to fill.
    """
    references = References(None, [], (), Outcome(1, counts="worst_difference"))
    references.alone[0, (0,)] = np.full((8, 8, 3), 10)
    references.digests["sha256:0"], references.spells["style-0"] = 0, [Spell(0, 0.0)]
    return partial(why_wrong, references=references, max_held=4), Times()


def _asked(status: int, document: dict[str, Any], *, begun: float | None = None, ended: float | None = None) -> Asked:
    begun = time.monotonic() if begun is None else begun
    ended = begun + 1.0 if ended is None else ended
    return Asked(0, ["style-0"], begun, ended=ended, status=status, code=str(document.get("code", "")), document=document)
