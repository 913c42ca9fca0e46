# SPDX-License-Identifier: Apache-2.0
"""The tool that writes signatures into the records of model classes."""

import click
import pytest

from tools.families import FOLDER, family_files, formatted, new_record, renewed


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
