# SPDX-License-Identifier: Apache-2.0
"""The rehearsal's part of `make soak`: every family on a CUDA device made of the CPU, with the table of waits and copies."""

import random
import time
from pathlib import Path

from support.soak.frame import Outcome


def run_rehearsal(folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Try `count` families in a seeded order, or all for 0, and print a line for each and its causes.

    After `limit_s` no other family begins. Nothing is written to `folder`. Faults are another result than the CPU's, waits that are not
    allowed, uses of values that were not ordered, and any exception. If all families were tried, an allowed wait that no longer occurs is a
    fault too.
    """
    # The families import torch, and the other parts need none.
    from support.families.rig.all import FAMILIES
    from support.rehearsal.allowed import faults_of, stale
    from support.rehearsal.family_trial import BEYOND, Trial, try_family

    outcome = Outcome(seed, counts="quiet equal")
    within = [family for family in FAMILIES if family.name not in BEYOND]
    families = random.Random(seed).sample(within, count or len(within))
    trials: list[Trial] = []
    started = time.monotonic()
    for family in families:
        if time.monotonic() - started > limit_s:
            break
        outcome.done += 1
        try:
            trials.append(trial := try_family(family))
        except Exception as error:
            outcome.wrong.append(f"{family.name}: {type(error).__name__}: {error}")
            continue
        print("\n".join([trial.line(), *trial.causes()]), flush=True)
        outcome.wrong += faults_of(trial)
        outcome.equal += trial.is_equal
        outcome.quiet += trial.is_quiet
    if len(trials) == len(within):
        outcome.wrong += [f"allowed, but no longer there: {name}" for name in stale(trials)]
    outcome.seconds = time.monotonic() - started
    return outcome
