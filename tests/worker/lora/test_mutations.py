# SPDX-License-Identifier: Apache-2.0
"""Mutated adapter files on a real manager: a sample of the ten thousand that `make soak SOAK="--part adapter-files"` tries."""

import random
from pathlib import Path

import pytest

from support.lora.adapter_mutations import KINDS, RawFile, mutation
from support.lora.files import CASES, make_file
from support.soak.adapter_files import PICKED, run_files

SEED = 20


@pytest.mark.parametrize("picked", [("Flux 2, Kohya", "SD3, peft"), pytest.param(PICKED, marks=pytest.mark.slow)], ids=["two", "all"])
def test_a_mutated_file_is_used_whole_or_refused_by_name_and_leaves_nothing(tmp_path: Path, picked: tuple[str, ...]) -> None:
    """Read 250 mutated adapter files, as a damaged or hostile file may be; none may be used in part or fail in another way."""
    outcome = run_files(tmp_path, seed=SEED, count=250, limit_s=100.0, picked=picked)
    assert outcome.wrong == []
    assert outcome.done == 250
    assert outcome.refused["InvalidAdapter"] > 150
    assert outcome.refused["UnsupportedFormat"]
    assert outcome.kinds.keys() == KINDS


def test_mutations_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "Flux 2, Kohya")
    good = RawFile.parse(make_file(case, case.build(), tmp_path).path.read_bytes())
    one, other = (mutation(random.Random(SEED), good, good) for _ in range(2))
    assert (one.kind, one.content, one.names) == (other.kind, other.content, other.names)
