# SPDX-License-Identifier: Apache-2.0
"""The parallel kinds through real servers with the digits model: images, adapters, sleep, and refusals at start."""

from collections.abc import Iterator

import pytest

from support.runner.rig import levels_apart
from support.worker.process import DIGITS, WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

STRIPES = {"stripes": DIGITS / "loras" / "stripes"}
REQUEST = {"prompt": "a red digit seven", "seed": 1, "num_inference_steps": 6, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def split_worker() -> Iterator[WorkerProcess]:
    """Start a worker whose two ranks share the tokens of an image."""
    with WorkerProcess(ranks=2, loras=STRIPES, options=("--sequence=2", "--vae-tiling")) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture(scope="module")
def sharded_worker() -> Iterator[WorkerProcess]:
    """Provide a worker under --shard=2 with the stripes adapter. Every sharded tensor is split between its ranks."""
    with WorkerProcess(ranks=2, loras=STRIPES, options=("--shard=2",)) as worker:
        worker.wait_ready()
        yield worker


@pytest.mark.parametrize("model", ["digits", "stripes"])
def test_two_ranks_that_share_tokens_make_the_image_of_one(worker: WorkerProcess, split_worker: WorkerProcess, model: str) -> None:
    asked = REQUEST | {"model": model}
    assert levels_apart(worker.image(**asked), split_worker.image(**asked)) <= 1


def test_an_image_of_many_tiles_comes_out_whole_after_a_sleep(split_worker: WorkerProcess) -> None:
    asked = REQUEST | {"size": "128x96"}
    before = split_worker.image(**asked)
    assert before.size == (128, 96)
    split_worker.sleep()
    split_worker.wake()
    assert split_worker.image(**asked).tobytes() == before.tobytes()


def test_a_size_that_the_model_cannot_make_is_refused_with_its_bound_before_a_rank_sees_it(split_worker: WorkerProcess) -> None:
    ranks, before = split_worker.rank_pids(), split_worker.image(**REQUEST)
    # The model has positions for 32 x 32 tokens of 8 pixels.
    answer = split_worker.request_images(**REQUEST, size="512x512")
    assert answer.status_code == 400
    assert "size: expected at most 256x256, the largest for which the model has positions, found 512x512" in answer.text
    assert split_worker.image(**REQUEST).tobytes() == before.tobytes()
    assert split_worker.rank_pids() == ranks


def test_a_size_whose_tokens_cannot_be_shared_is_refused_by_name(split_worker: WorkerProcess) -> None:
    # A token is 8 pixels wide and high: 5 x 5 tokens.
    answer = split_worker.request_images(**REQUEST, size="40x40")
    assert answer.status_code == 400
    assert "size: expected a size whose number of tokens, of 8x8 pixels each, is a multiple of 2 (--sequence), found 40x40" in answer.text


@pytest.mark.parametrize("model", ["digits", "stripes"])
def test_two_ranks_that_share_the_memory_make_the_image_of_one(worker: WorkerProcess, sharded_worker: WorkerProcess, model: str) -> None:
    asked = REQUEST | {"model": model}
    assert levels_apart(worker.image(**asked), sharded_worker.image(**asked)) <= 1
    weights = [rank["memory"]["weightsBytes"] for rank in sharded_worker.state()["ranks"]]
    whole = worker.state()["ranks"][0]["memory"]["weightsBytes"]
    assert all(part < 0.7 * whole for part in weights)


def test_sleep_with_sharded_weights_is_refused_at_once(sharded_worker: WorkerProcess) -> None:
    answer = sharded_worker.control("POST", "/v1/sleep", json={"operationId": "one", "bootId": sharded_worker.boot_id})
    assert answer.status_code == 400
    assert "sleep: not supported with --shard 2" in answer.text
    assert sharded_worker.state()["state"] == "ready"


def test_a_kind_that_the_model_does_not_support_ends_the_start_with_its_name() -> None:
    with WorkerProcess(ranks=2, options=("--tensor=2",)) as refused:
        assert refused.wait_exit(600) == 1
        assert "--tensor: SD3Transformer2DModel (transformer) is not supported, expected one of Flux2" in refused.output
