# SPDX-License-Identifier: Apache-2.0
"""Calls that may be merged, how they are merged and cut, and the memory of their arguments' content."""

from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.runner.model_call import contents as contents_module
from diffusion_worker.runner.model_call.call import ModelCall, Role, execute, group_key, merge, role_of, slice_rows
from diffusion_worker.runner.model_call.contents import Contents, content


def call_of(rows: int, **arguments: Any) -> ModelCall:
    return ModelCall("transformer", "forward", {"hidden_states": torch.arange(rows * 2.0).reshape(rows, 2)} | arguments)


def test_arrays_of_objects_are_of_an_unknown_kind_and_never_equal() -> None:
    one, other = (np.array([{"of": name}], dtype=object) for name in "ab")
    assert content(one) is content(other) is None
    assert group_key(call_of(2, table=one)) is None


def test_merged_calls_concatenate_rows_and_expand_time_steps() -> None:
    merged = merge([call_of(2, timestep=torch.tensor(900)), call_of(1, timestep=torch.tensor([7.5]))])
    assert merged.rows == 3
    assert merged.arguments["timestep"].tolist() == [900.0, 900.0, 7.5]


def test_time_steps_of_one_precision_keep_it() -> None:
    merged = merge([call_of(1, timestep=torch.tensor([0.1], dtype=torch.float64))] * 2)
    assert merged.arguments["timestep"].dtype == torch.float64


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({"guidance": torch.ones(2)}, {"guidance": torch.zeros(2)}, True),
        ({"img_ids": torch.zeros(5, 3)}, {"img_ids": torch.zeros(5, 3)}, True),
        ({"img_ids": torch.zeros(5, 3)}, {"img_ids": torch.ones(5, 3)}, False),
        ({"img_ids": torch.zeros(2, 5, 3)}, {"img_ids": torch.ones(2, 5, 3)}, False),
        ({"return_dict": False}, {"return_dict": True}, False),
        ({"height": 32}, {"height": 64}, False),
        ({"encoder_hidden_states": torch.ones(2, 7)}, {"encoder_hidden_states": torch.ones(2, 8)}, False),
        ({"residuals": [torch.ones(2, 4)]}, {"residuals": [torch.zeros(2, 4)]}, True),
        ({"residuals": [torch.ones(2, 4)]}, {"residuals": [torch.zeros(2, 4), torch.zeros(2, 4)]}, False),
        ({"added": {"time_ids": torch.ones(2, 6)}}, {"added": {"time_ids": torch.zeros(2, 6)}}, True),
        ({"added": {"scale": torch.ones(3)}}, {"added": {"scale": torch.zeros(3)}}, False),
        ({"image_embeds": torch.ones(2, 4)}, {"image_embeds": torch.zeros(2, 4)}, False),
        ({"scale": np.float32(1)}, {"scale": np.float32(2)}, False),
        ({"sizes": [[(1, 2, 3)]]}, {"sizes": [[(1, 3, 2)]]}, False),
    ],
)
def test_calls_share_a_group_unless_an_argument_that_has_no_rows_differs(one: Any, other: Any, shared: bool) -> None:
    assert (group_key(call_of(2, **one)) == group_key(call_of(2, **other))) is shared


def test_a_call_with_an_argument_of_an_unknown_kind_runs_alone() -> None:
    assert group_key(call_of(2, cache=object())) is None
    assert group_key(call_of(2, added={"cache": object(), "rows": torch.ones(2, 1)})) is None


def test_a_call_without_rows_runs_alone_as_one_row() -> None:
    call = ModelCall("transformer", "forward", {"timestep": torch.tensor([1.0]), "scale": 1.0})
    assert group_key(call) is None
    assert (call.rows, call.listed) == (1, False)


def test_a_method_that_nobody_knows_to_work_by_rows_runs_alone() -> None:
    assert group_key(ModelCall("text_encoder", "generate", {"input_ids": torch.ones(2, 4)})) is None


def test_rows_that_go_together_only_by_their_number_are_refused_with_the_argument_that_differs() -> None:
    with pytest.raises(ValueError, match="encoder_hidden_states: expected rows of one precision and one shape"):
        merge([call_of(1, encoder_hidden_states=torch.ones(1, 7)), call_of(1, encoder_hidden_states=torch.ones(1, 8))])


def test_a_precision_asked_for_by_autocast_keeps_calls_apart_and_is_kept() -> None:
    layer = torch.nn.Linear(2, 2)
    plain = ModelCall("transformer", "forward", {"input": torch.ones(1, 2)}, module=layer)
    half = ModelCall("transformer", "forward", {"input": torch.ones(1, 2)}, module=layer, autocast=("cpu", torch.bfloat16))
    assert group_key(plain) != group_key(half)
    assert execute(layer, plain).dtype == torch.float32
    assert execute(layer, half).dtype == torch.bfloat16


def test_the_rows_are_those_of_the_latents_whatever_comes_first() -> None:
    call = ModelCall("unet", "forward", {"timestep": torch.tensor([1.0]), "mask": torch.ones(1, 5), "sample": torch.ones(3, 4)})
    assert call.rows == 3
    assert role_of(call, "mask") is Role.EQUAL
    assert role_of(call, "sample") is Role.ROW
    assert role_of(call, "timestep") is Role.TIME


def test_rows_of_a_call_are_cut_out_of_every_argument_that_has_rows() -> None:
    call = call_of(3, mask=torch.tensor([1, 2, 3]), added={"ids": torch.ones(3, 2)}, table_ids=torch.zeros(3, 2))
    part = slice_rows(call, 1, 3)
    assert part.rows == 2
    assert part.arguments["mask"].tolist() == [2, 3]
    assert part.arguments["added"]["ids"].shape == (2, 2)
    assert part.arguments["table_ids"].shape == (3, 2)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Provide a list that gets each value whose content is hashed during the test."""
    seen: list[torch.Tensor] = []

    def counting(value: Any) -> Any:
        seen.append(value)
        return content(value)

    monkeypatch.setattr(contents_module, "content", counting)
    return seen


def test_a_table_that_is_passed_at_every_step_is_looked_at_once(hashed: list[torch.Tensor]) -> None:
    table, known = torch.zeros(5, 3), Contents()
    keys = {group_key(call_of(2, img_ids=table), known) for _ in range(4)}
    assert len(keys) == 1
    assert [value is table for value in hashed] == [True]


def test_tables_that_are_passed_in_turn_are_looked_at_once_each(hashed: list[torch.Tensor]) -> None:
    tables, known = [torch.full((5, 3), float(number)) for number in range(4)], Contents()
    first = [group_key(call_of(2, img_ids=table), known) for table in tables]
    assert [group_key(call_of(2, img_ids=table), known) for table in tables] == first
    assert len(set(first)) == len(hashed) == 4
    # A fifth takes the place of the oldest.
    group_key(call_of(2, img_ids=torch.zeros(5, 3)), known)
    assert [group_key(call_of(2, img_ids=table), known) for table in tables[1:]] == first[1:]
    assert len(hashed) == 5
    group_key(call_of(2, img_ids=tables[0]), known)
    assert len(hashed) == 6


@pytest.mark.parametrize("inference", [False, True])
def test_a_table_that_was_written_to_or_replaced_is_looked_at_again(inference: bool) -> None:
    with torch.inference_mode(inference):
        table, known = torch.zeros(5, 3), Contents()
        before = group_key(call_of(2, img_ids=table), known)
        table[0, 0] = 1
        assert group_key(call_of(2, img_ids=table), known) != before
        assert group_key(call_of(2, img_ids=torch.zeros(5, 3)), known) == before
