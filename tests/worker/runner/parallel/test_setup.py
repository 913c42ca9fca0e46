# SPDX-License-Identifier: Apache-2.0
"""The parallel kinds over real processes: each computes its part of tokens, layers, weights or tiles. All get the same result as one rank.

Requests run through the model runner in float64, where a difference above 1e-9 is a fault and no rounding.
"""

from typing import Any

import pytest

from support.runner import rank_processes
from support.runner.parallel_scenarios import (
    FOUR_RANKS_SEQUENCE_FAMILIES,
    FOUR_RANKS_TENSOR_FAMILIES,
    MORE_SEQUENCE_FAMILIES,
    SEQUENCE_FAMILIES,
    SHARDED_FAMILIES,
    TENSOR_FAMILIES,
)

# A start of rank processes imports torch and diffusers for ten seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """Run the scenario `two` on two rank processes, once for the module, and provide the results of each rank."""
    return rank_processes.run("support.runner.parallel_scenarios:two")


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """Run the scenario `four` on four rank processes, once for the module, and provide the results of each rank."""
    return rank_processes.run("support.runner.parallel_scenarios:four", world=4)


@pytest.mark.parametrize("family", [*SEQUENCE_FAMILIES, *MORE_SEQUENCE_FAMILIES])
def test_tokens_over_two_ranks_give_what_one_rank_gives(two: list[dict[str, Any]], family: str) -> None:
    for found in (rank[f"{family} sequence"] for rank in two):
        assert found.apart <= TOLERANCE
        assert found.tokens == 0.5


@pytest.mark.parametrize("family", TENSOR_FAMILIES)
def test_layers_over_two_ranks_give_what_one_rank_gives_with_an_adapter_in_the_same_batch(two: list[dict[str, Any]], family: str) -> None:
    for rank in two:
        assert rank[f"{family} tensor"].apart <= TOLERANCE
        assert rank[f"{family} tensor"].weights < 0.8
        # The adapter has a visible effect.
        assert rank[f"{family} adapter"] > 0.01


@pytest.mark.parametrize("family", SHARDED_FAMILIES)
def test_sharded_weights_give_bit_for_bit_what_whole_ones_give(two: list[dict[str, Any]], family: str) -> None:
    for found in (rank[f"{family} shard"] for rank in two):
        assert found.apart == 0.0
        assert found.weights < 0.53
    assert sum(rank[f"{family} shard"].weights for rank in two) == pytest.approx(1.0)


@pytest.mark.parametrize("family", FOUR_RANKS_SEQUENCE_FAMILIES)
def test_tokens_over_two_of_four_ranks_with_rows_over_the_others_give_what_one_rank_gives(four: list[dict[str, Any]], family: str) -> None:
    for found in (rank[f"{family} sequence 2 x rows 2"] for rank in four):
        assert found.apart <= TOLERANCE
        assert found.tokens == 0.5


@pytest.mark.parametrize("family", FOUR_RANKS_TENSOR_FAMILIES)
def test_layers_over_two_of_four_ranks_with_rows_over_the_others_give_what_one_rank_gives(four: list[dict[str, Any]], family: str) -> None:
    for found in (rank[f"{family} tensor 2 x rows 2"] for rank in four):
        assert found.apart <= TOLERANCE
        assert found.weights < 0.8


@pytest.mark.parametrize("family", FOUR_RANKS_TENSOR_FAMILIES)
def test_adapters_on_layers_over_four_ranks_give_what_one_rank_gives(four: list[dict[str, Any]], family: str) -> None:
    for found in (rank[f"{family} tensor 4"] for rank in four):
        assert found.apart <= TOLERANCE
        assert found.weights < 0.6


def test_tokens_over_four_ranks_and_beside_sharded_weights_give_what_one_rank_gives(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["QwenImagePipeline sequence 4"].apart <= TOLERANCE
        assert rank["QwenImagePipeline sequence 4"].tokens == 0.25
        both = rank["QwenImagePipeline sequence 2 x shard 2"]
        assert both.apart <= TOLERANCE
        assert (both.tokens, both.weights < 0.53) == (0.5, True)
        assert rank["FluxPipeline shard 2 x rows 2"].apart <= TOLERANCE
        assert rank["FluxPipeline shard 2 x rows 2"].weights < 0.53


def test_the_ranks_are_the_product_of_all_sizes_and_only_those_of_one_group_compute_the_same_rows(four: list[dict[str, Any]]) -> None:
    each = [rank["places"] for rank in four]
    expected = {
        "{'sequence': 2}": ({"rows": 2, "shard": 1, "ring": 1, "ulysses": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        "{'tensor': 2}": ({"rows": 2, "shard": 1, "tensor": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        "{'shard': 2}": ({"rows": 2, "shard": 2}, [[0], [1], [2], [3]]),
        "{'sequence': 2, 'shard': 2}": ({"rows": 1, "shard": 2, "ring": 1, "ulysses": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        "{'tensor': 4}": ({"rows": 1, "shard": 1, "tensor": 4}, [[0, 1, 2, 3]] * 4),
    }
    for sizes, (mesh, rows) in expected.items():
        assert [places[sizes] for places in each] == [(mesh, ran) for ran in rows]
    assert {places["{'tensor': 3}"] for places in each} == {"4 ranks are not a multiple of --tensor 3 x --sequence 1 x --shard 1"}


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage"])
def test_tiles_over_two_ranks_are_bit_for_bit_those_of_one(two: list[dict[str, Any]], kind: str) -> None:
    for size, tiles in (("29x17", 15), ("8x31", 12)):
        found = [rank["tiles"][f"{kind} {size}"] for rank in two]
        assert [one["equal"] for one in found] == [True, True]
        assert sum(one["ran"] for one in found) == found[0]["alone"] == tiles
    if kind == "AutoencoderKL":
        assert [rank["tiles"]["a copy in float64"]["equal"] for rank in two] == [True, True]
        assert sum(rank["tiles"]["a copy in float64"]["ran"] for rank in two) == 15
    # A single tile leaves only its rows to spread.
    assert [rank["tiles"][f"{kind} 8x8"] for rank in two] == [{"equal": False, "close": True, "ran": 1, "alone": 1}] * 2


def test_a_video_is_decoded_by_rows_and_not_by_tiles(two: list[dict[str, Any]]) -> None:
    assert all(rank["tiles"]["two frames"]["close"] for rank in two)


def test_an_error_in_a_tile_of_one_rank_is_the_same_error_on_both_and_the_next_image_works(two: list[dict[str, Any]]) -> None:
    assert [rank["tiles"]["a tile fails"] for rank in two] == [["rank 1: RuntimeError: out of memory", "(1, 3, 34, 34)"]] * 2


def test_sharded_weights_run_without_gradients_and_all_else_in_inference_mode(two: list[dict[str, Any]]) -> None:
    inference, no_gradients = (True, False), (False, False)
    for rank in two:
        assert rank["gradients"] == {"": inference, "shard": no_gradients, "sequence": inference, "tensor": inference}


def test_layers_over_two_ranks_sleep_and_wake_with_the_same_contents_from_their_files(two: list[dict[str, Any]]) -> None:
    for found in (rank["sleep"] for rank in two):
        awake = found["awake"]
        assert found["same"]
        # No file holds the VAE of this pipeline.
        assert 0 < awake.mirror_file_bytes < awake.weights_bytes <= awake.weights_resident_bytes
        assert found["emptied"]


def test_a_text_that_cannot_be_split_is_an_error_of_its_request_alone(two: list[dict[str, Any]]) -> None:
    error = "InvalidRequest: the text: expected a number of tokens that is a multiple of --sequence 2, found 7"
    assert [rank["an odd text"] for rank in two] == [[error, "even"]] * 2


def test_one_rank_decodes_all_tiles() -> None:
    (found,) = rank_processes.run("support.runner.scenarios:tiles", world=1)
    assert found["AutoencoderKL 29x17"] == {"equal": True, "close": True, "ran": 15, "alone": 15}
    assert found["a tile fails"] == ["rank 0: RuntimeError: out of memory", "(1, 3, 34, 34)"]


def test_a_rank_that_fails_between_collectives_ends_and_the_one_that_waits_for_it_too() -> None:
    rank_processes.run("support.runner.parallel_scenarios:left_in_a_collective", exit_codes=(70, 70))
