# SPDX-License-Identifier: Apache-2.0
"""The classifier of the digits' judge without scikit-learn: `python -m tools.gpu.judge FILE` trains and writes it, numpy reads it.

scikit-learn and scipy would take all the room that carried wheels have. The file has the support vectors of the trained classifier.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "DIFFUSION_GPU_JUDGE"
Numbers = NDArray[np.float64]


class Classifier:
    """A support vector machine with a Gaussian kernel: each pair of classes votes, as libsvm does it."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._vectors: Numbers = parts["vectors"].astype(np.float64)
        self._weights: Numbers = parts["weights"]
        self._intercepts: Numbers = parts["intercepts"]
        self._classes = parts["classes"]
        self._gamma = float(parts["gamma"])
        ends = np.cumsum(parts["counts"])
        self._of_class = [slice(int(end - count), int(end)) for end, count in zip(ends, parts["counts"], strict=True)]

    def predict(self, rows: Numbers) -> NDArray[np.int64]:
        """Return the class of each row."""
        return np.array([self._classes[self._vote(row)] for row in np.asarray(rows, dtype=np.float64)])

    def _vote(self, row: Numbers) -> int:
        near = np.exp(-self._gamma * ((self._vectors - row) ** 2).sum(axis=1))
        votes = np.zeros(len(self._of_class), dtype=int)
        pair = 0
        for first, mine in enumerate(self._of_class):
            for second in range(first + 1, len(self._of_class)):
                theirs = self._of_class[second]
                decision = self._weights[second - 1, mine] @ near[mine] + self._weights[first, theirs] @ near[theirs]
                votes[first if decision + self._intercepts[pair] > 0 else second] += 1
                pair += 1
        return int(votes.argmax())


def parts_of(trained: Any) -> dict[str, Any]:
    """Return the arrays of a trained support vector classifier of scikit-learn that `Classifier` computes with."""
    return {
        "vectors": trained.support_vectors_.astype(np.float32),
        "weights": trained.dual_coef_,
        "intercepts": trained.intercept_,
        "counts": trained.n_support_,
        "classes": trained.classes_,
        "gamma": np.float64(trained._gamma),
    }


def load(path: Path) -> Classifier:
    """Read a classifier from a file that `main` wrote."""
    with np.load(path) as parts:
        return Classifier(dict(parts))


def carried_file() -> Path:
    """Return the path in the environment variable DIFFUSION_GPU_JUDGE; raise RuntimeError if it is not set. The file may be missing."""
    if not (named := os.environ.get(FILE)):
        raise RuntimeError(f"{FILE}: expected the file that `make gpu-wheels` writes, found nothing")
    return Path(named)


def main(path: str) -> None:
    """Train the judge's classifier with scikit-learn, and write it to a file, whose folder is made if it is missing."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    trained = importlib.import_module("support.runner.digit_judge").classifier()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **parts_of(trained))
    print(f"wrote {path}, {Path(path).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1])
