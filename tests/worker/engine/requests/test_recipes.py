# SPDX-License-Identifier: Apache-2.0
"""Settings that a request inherits from its adapters' recipes, conflicts between them, and the adapters that a request may name."""

import pytest

from diffusion_worker.engine.requests.adapter_selection import chosen
from diffusion_worker.engine.requests.admission import AdapterChoice, GenerationParams
from diffusion_worker.engine.requests.recipes import agreed, inherit
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Recipe

FEW = Recipe(steps=4, guidance_scale=1.0)


def refused(error: pytest.ExceptionInfo[RequestError], field: str) -> bool:
    return error.value.code is ErrorCode.INVALID_REQUEST and error.value.details == {"field": field}


# Recipes


def test_a_request_inherits_what_it_does_not_say() -> None:
    params = inherit(GenerationParams(prompt="p kumquatfen", steps=4), *agreed([("fast", FEW), ("plain", None)]))
    assert (params.steps, params.guidance_scale) == (4, 1.0)


@pytest.mark.parametrize(
    ("asked", "field", "says"),
    [
        ({"steps": 8}, "num_inference_steps", "expected 4, as the recipe of adapter 'fast' says, or no value, found 8"),
        ({"guidance_scale": 5.0}, "guidance_scale", "expected 1, as the recipe of adapter 'fast' says, or no value, found 5"),
    ],
)
def test_a_request_that_says_something_else_is_refused_by_field_expected_found_and_adapter(
    asked: dict[str, float], field: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        inherit(GenerationParams(prompt="p kumquatfen", **asked), *agreed([("fast", FEW)]))  # type: ignore[arg-type]
    assert refused(error, field)


def test_adapters_whose_recipes_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="the same steps: 4, as adapter 'fast' has, found 8 of adapter 'slow'") as error:
        agreed([("fast", FEW), ("slow", Recipe(steps=8))])
    assert refused(error, "lora")


def test_recipes_that_say_different_things_are_followed_together() -> None:
    recipe, owners = agreed([("fast", Recipe(steps=2, sigmas=[1.0, 0.5])), ("warm", Recipe(shift=3.0, guidance_scale=2.0))])
    assert recipe == Recipe(steps=2, sigmas=[1.0, 0.5], shift=3.0, guidance_scale=2.0)
    assert owners == {"steps": "fast", "sigmas": "fast", "shift": "warm", "guidance_scale": "warm"}


def test_sigmas_say_how_many_steps_there_are() -> None:
    recipe, owners = agreed([("fast", Recipe(sigmas=[1.0, 0.7, 0.4]))])
    assert inherit(GenerationParams(prompt="p kumquatfen"), recipe, owners).steps == 3
    with pytest.raises(RequestError, match="num_inference_steps: expected 3"):
        inherit(GenerationParams(prompt="p kumquatfen", steps=4), recipe, owners)
    with pytest.raises(RequestError, match="sigmas"):
        agreed([("fast", Recipe(sigmas=[1.0, 0.5])), ("other", Recipe(sigmas=[1.0, 0.4]))])


def test_a_number_in_single_precision_is_the_number_of_the_request() -> None:
    recipe, owners = agreed([("one", Recipe(guidance_scale=3.5999999046)), ("two", Recipe(guidance_scale=3.6))])
    assert inherit(GenerationParams(prompt="p kumquatfen", guidance_scale=3.6), recipe, owners).steps is None


# Names


def choices(model: str | None = None, *loras: tuple[str, float | None], scale: float | None = None) -> list[AdapterChoice]:
    params = GenerationParams(prompt="p kumquatfen", model=model, loras=[AdapterChoice(*each) for each in loras], lora_scale=scale)
    return chosen(params, served_names=["base"], most=3)


def test_model_and_loras_name_adapters_together() -> None:
    assert choices() == choices("base") == []
    assert choices("a", ("b", 0.5), ("c", None)) == [AdapterChoice("a", field="model"), AdapterChoice("b", 0.5), AdapterChoice("c")]


def test_lora_scale_is_for_the_only_adapter_that_has_none() -> None:
    assert choices("a", scale=0.25) == [AdapterChoice("a", 0.25, "model")]
    assert choices("a", ("b", 0.5), scale=0.25) == [AdapterChoice("a", 0.25, "model"), AdapterChoice("b", 0.5)]


@pytest.mark.parametrize(
    ("model", "loras", "scale", "field", "says"),
    [
        ("a", [("a", 0.5)], None, "lora", "every adapter once, found 'a' 2 times"),
        (None, [("b", None), ("b", 1.0), ("b", 1.0)], None, "lora", "found 'b' 3 times"),
        ("a", [("b", None), ("c", None), ("d", None)], None, "lora", "at most 3 adapters in a request, found 4"),
        (None, [], 0.5, "lora_scale", "found no adapter, only the base model"),
        ("base", [], 0.5, "lora_scale", "found no adapter, only the base model"),
        ("a", [("b", None)], 0.5, "lora_scale", "found 2 of 2 adapters without one"),
        (None, [("b", 1.0)], 0.5, "lora_scale", "found 0 of 1 adapters without one"),
    ],
)
def test_a_wrong_list_of_adapters_is_refused_with_the_reason(
    model: str | None, loras: list[tuple[str, float | None]], scale: float | None, field: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        choices(model, *loras, scale=scale)
    assert refused(error, field)
