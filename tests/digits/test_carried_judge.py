# SPDX-License-Identifier: Apache-2.0
"""The judge's classifier without scikit-learn, as `make gpu` carries it, against scikit-learn's own."""

from pathlib import Path

import numpy as np
import pytest

from support.runner.digit_judge import _drawings, classifier
from tools.gpu.judge import FILE, carried_file, load, parts_of


def test_the_carried_classifier_reads_every_drawing_as_scikit_learn_does(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "judge.npz", **parts_of(classifier()))
    drawings, _ = _drawings(held_out=True, repeats=1, seed=5)
    expected = classifier().predict(drawings)
    assert len(set(expected)) == 10
    assert (load(tmp_path / "judge.npz").predict(drawings) == expected).all()


def test_a_classifier_that_nobody_carried_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    with pytest.raises(RuntimeError, match="expected the file that `make gpu-wheels` writes"):
        carried_file()
