# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of ranks that make each call together: what the processes of their tests run."""

from typing import Any

from support.runner.rank_processes import Rank
from support.runner.wordy_pipelines import WordyFlux, runner_of
from support.worker.extensions import flip


def tensor(rank: Rank) -> dict[str, Any]:
    """Each layer in two parts."""
    return _over_a_sleep(rank, tensor=2)


def sequence(rank: Rank) -> dict[str, Any]:
    """Half of the tokens each."""
    return _over_a_sleep(rank, sequence=2)


def _over_a_sleep(rank: Rank, **kind: int) -> dict[str, Any]:
    with rank.group(**kind) as parallel:
        runner = runner_of(WordyFlux, parallel, ranks=rank.world, **kind)
        before = runner.fingerprint(probe=True)
        runner.release()
        runner.restore()
        after = runner.fingerprint(probe=True)
        flip(runner.weights.tensors()[-1])
        return {"before": before, "after": after, "spoilt": runner.fingerprint(probe=True)}
