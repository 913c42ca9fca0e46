# SPDX-License-Identifier: Apache-2.0
"""The tool that writes signatures into the records of model classes, and the facts of pipeline classes."""

import click
import msgspec
import pytest

from diffusion_worker.runner.families import PipelineFacts
from tools.families import FOLDER, family_files, formatted, new_record, renewed
from tools.pipeline_facts import PAGE, divisors, written


@pytest.mark.slow
def test_records_as_they_are_installed_are_written_as_they_stand() -> None:
    files = family_files()
    assert len(files) > 10
    for path in files:
        assert formatted(renewed(path.read_text())) == path.read_text(), path.name


def test_an_old_signature_is_renewed_and_all_else_is_kept() -> None:
    source = (FOLDER / "bria.py").read_text()
    old = source.replace("pooled_projections=None, ", "")
    assert old != source
    assert formatted(renewed(old)) == source


def test_a_record_of_a_class_that_has_none_has_the_methods_whose_calls_are_merged() -> None:
    assert '"encode": "x, return_dict=True", "decode": "' in new_record("AutoencoderTiny")
    made = new_record("LTX2Vocoder")
    assert 'signatures={"forward": "hidden_states, time_last=False"}' in made
    assert formatted(made) == made


def test_a_name_of_no_class_is_refused() -> None:
    with pytest.raises(click.ClickException, match="NoSuchModel is neither in diffusers nor in transformers"):
        new_record("NoSuchModel")


class Checked:
    """A pipeline whose `check_inputs` has several forms of checks for divisors of the size."""

    class transformer:
        patch_size = 3

    def check_inputs(self, height: int, width: int, steps: int) -> None:
        local = 11
        if height % (self.transformer.patch_size * 2) != 0 or width % 4:
            raise ValueError
        if height % local or width % self.unknown or width % (local + 1) or steps % 7:  # type: ignore[attr-defined]
            raise ValueError
        if height % 5:
            print("resized")


def test_divisors_of_numbers_and_settings_are_read_where_a_check_refuses_and_others_are_left_alone() -> None:
    assert sorted(divisors(Checked.check_inputs)) == ["4", "transformer.patch_size * 2", "unknown"]
    assert list(divisors(None)) == []


def test_the_table_of_facts_has_the_form_that_the_tool_writes() -> None:
    facts = msgspec.json.decode(PAGE.read_bytes(), type=dict[str, PipelineFacts])
    assert len(facts) > 300
    assert written(facts) == PAGE.read_text()
