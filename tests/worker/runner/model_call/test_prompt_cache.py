# SPDX-License-Identifier: Apache-2.0
"""A prompt that is asked for again needs no text encoder, and gets the encoder's output bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.messages import PromptCacheStats, Tick
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from support.runner.rig import RunnerRig, request

ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig(prompt_cache_size=6)


@pytest.fixture(autouse=True)
def empty(rig: RunnerRig) -> None:
    rig.runner.clear_prompt_embed_cache()


def encoder_rows(rig: RunnerRig) -> list[int]:
    """Return the number of rows in each text-encoder call of the latest run; an empty list if the cache served every prompt."""
    return [call.rows for call in rig.parallel.calls if call.component in ENCODERS]


def counts(rig: RunnerRig) -> dict[str, int]:
    stats = rig.runner.get_prompt_embed_cache_stats()
    assert stats is not None
    return stats


def test_a_second_identical_prompt_calls_no_text_encoder_and_gives_the_same_bits(rig: RunnerRig) -> None:
    before = counts(rig)
    first, _ = rig.run(request("a", prompt="a red digit one", guidance_scale=1.0))
    assert encoder_rows(rig) == [1, 1]
    again, _ = rig.run(request("a", prompt="a red digit one", guidance_scale=1.0))
    assert encoder_rows(rig) == []
    np.testing.assert_array_equal(first["a"], again["a"])
    after = counts(rig)
    assert (after["size"], after["max_size"]) == (2, 6)
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (2, 2)


def test_a_cleared_prompt_cache_encodes_again_and_its_counts_go_on(rig: RunnerRig) -> None:
    spec = request("a", prompt="a red digit nine", guidance_scale=1.0)
    rig.run(spec)
    before = counts(rig)
    assert before.keys() == {"size", "max_size", "hits", "misses", "bypassed"}
    rig.runner.clear_prompt_embed_cache()
    assert counts(rig) == before | {"size": 0}
    rig.run(spec)
    assert encoder_rows(rig) == [1, 1]
    assert counts(rig) == before | {"misses": before["misses"] + 2}


def test_requests_that_ask_the_same_at_the_same_time_share_one_call_of_one_row(rig: RunnerRig) -> None:
    rig.run(*(request(name, prompt="a red digit two", guidance_scale=1.0) for name in "abc"))
    assert encoder_rows(rig) == [1, 1]


def test_what_was_made_in_company_is_not_given_to_a_request_alone(rig: RunnerRig) -> None:
    spec = request("a", prompt="a red digit three", guidance_scale=1.0)
    alone, _ = rig.run(spec)
    rig.runner.clear_prompt_embed_cache()
    rig.run(spec, request("b", prompt="a blue digit four", guidance_scale=1.0))
    assert encoder_rows(rig) == [2, 2]
    again, _ = rig.run(spec)
    assert encoder_rows(rig) == [1, 1]
    np.testing.assert_array_equal(alone["a"], again["a"])


def test_the_least_recently_asked_goes_first(rig: RunnerRig) -> None:
    for prompt in ("one", "two", "three", "one", "four"):  # a prompt has two entries, and six entries fit
        rig.run(request("a", prompt=prompt, guidance_scale=1.0, steps=1))
    rig.run(request("a", prompt="one", guidance_scale=1.0, steps=1))
    assert encoder_rows(rig) == []
    rig.run(request("a", prompt="two", guidance_scale=1.0, steps=1))
    assert encoder_rows(rig) == [1, 1]


def test_sleep_and_new_weights_empty_it(rig: RunnerRig) -> None:
    rig.run(request("a", prompt="a digit", steps=1))
    rig.runner.load_weights([])
    assert counts(rig)["size"] == 0
    rig.run(request("a", prompt="a digit", steps=1))
    assert counts(rig)["size"] > 0
    rig.runner.release()
    rig.runner.restore()
    assert counts(rig)["size"] == 0


def test_switched_off_it_has_no_stats_clearing_is_harmless_and_every_prompt_is_encoded() -> None:
    rig = RunnerRig(prompt_cache_size=0)
    assert rig.runner.get_prompt_embed_cache_stats() is None
    rig.runner.clear_prompt_embed_cache()
    for _ in range(2):
        rig.run(request("a", guidance_scale=1.0, steps=1))
        assert encoder_rows(rig) == [1, 1]


def ask(**arguments: Any) -> ModelCall:
    return ModelCall("text_encoder", "forward", {"input_ids": torch.tensor([[1, 2, 3]])} | arguments)


@pytest.mark.parametrize(
    "other",
    [
        ask(input_ids=torch.tensor([[1, 2, 4]])),
        ask(input_ids=torch.tensor([[1, 2, 3]], dtype=torch.int32)),
        ask(attention_mask=torch.ones(1, 3)),
        ask(output_hidden_states=True),
        ModelCall("text_encoder_2", "forward", {"input_ids": torch.tensor([[1, 2, 3]])}),
    ],
)
def test_everything_that_is_asked_tells_two_prompts_apart(other: ModelCall) -> None:
    cache = PromptCache(4)
    assert cache.key(ask()) == cache.key(ask())
    assert cache.key(other) != cache.key(ask())


def test_an_adapter_tells_two_prompts_apart() -> None:
    assert PromptCache(4).key(ask(), adapter="sha256:1") != PromptCache(4).key(ask(), adapter="sha256:2")


@pytest.mark.parametrize(
    ("call", "bypassed"),
    [
        (ask(cache=object()), 1),
        (ModelCall("text_encoder", "generate", {"input_ids": torch.ones(1, 3)}), 1),
        (ModelCall("vae", "decode", {"z": torch.ones(1, 3)}), 0),
        (ModelCall("transformer", "forward", {"input_ids": torch.ones(1, 3)}), 0),
    ],
)
def test_what_cannot_be_compared_or_is_drawn_anew_is_not_kept(call: ModelCall, bypassed: int) -> None:
    cache = PromptCache(4)
    assert cache.key(call) is None
    assert cache.stats().bypassed == bypassed


def test_what_is_made_and_not_kept_is_bypassed_and_no_miss_so_that_each_call_counts_once() -> None:
    cache = PromptCache(4)
    cache.put("drawn", object(), alone=True)
    cache.put("key", torch.ones(1), alone=True)
    assert cache.get("key", alone=True) is not None
    counted = cache.stats()
    assert (counted.hits, counted.misses, counted.bypassed) == (1, 1, 1)


def test_counts_are_told_when_they_changed_and_only_then() -> None:
    cache = PromptCache(4)
    assert cache.news() == cache.stats()
    assert cache.news() is None
    cache.put("key", torch.ones(1), alone=True)
    assert cache.news() == PromptCacheStats(size=1, max_size=4, misses=1)
    assert cache.news() is None


def test_a_tick_reports_the_counts_only_where_they_changed(rig: RunnerRig) -> None:
    outputs = [
        rig.runner.execute_stepwise(Tick(number, [request("a", prompt="a new digit", steps=3)] if number == 0 else []))
        for number in range(3)
    ]
    told = [output.prompt_cache for output in outputs]
    assert told[0] is not None
    assert told[1:] == [None, None]
    rig.runner.drop_all()


def test_what_a_request_does_to_its_answer_does_not_reach_the_next() -> None:
    cache = PromptCache(4)
    answer = {"last_hidden_state": torch.ones(1, 3)}
    cache.put("key", answer, alone=True)
    answer["last_hidden_state"].zero_()
    first = cache.get("key", alone=True)
    assert first is not None
    first["last_hidden_state"].zero_()
    second = cache.get("key", alone=True)
    assert second is not None
    assert second["last_hidden_state"].tolist() == [[1.0, 1.0, 1.0]]


def test_bytes_are_bounded_as_entries_are() -> None:
    cache = PromptCache(4, max_bytes=100)
    for key in "abc":
        cache.put(key, torch.ones(10), alone=True)
    assert [cache.get(key, alone=True) is not None for key in "abc"] == [False, True, True]
    cache.put("large", torch.ones(100), alone=True)
    assert cache.get("large", alone=True) is None
    assert cache.stats().bypassed == 1


def test_an_answer_with_more_than_tensors_is_not_kept() -> None:
    cache = PromptCache(4)
    cache.put("key", {"past_key_values": object()}, alone=True)
    assert cache.get("key", alone=True) is None


def test_a_tick_that_finds_its_prompt_makes_the_step_only(rig: RunnerRig) -> None:
    rig.run(request("a", prompt="again", steps=1))
    output = rig.runner.execute_stepwise(Tick(0, [request("b", prompt="again", steps=2)]))
    assert output.calls == 1
    rig.runner.drop_all()
