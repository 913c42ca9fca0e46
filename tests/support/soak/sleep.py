# SPDX-License-Identifier: Apache-2.0
"""The soak of sleep: random sequences of sleep, wake, requests, changes of adapters and policy, and killed ranks and servers.

The same seed chooses the same sequences. All of them share one worker, which each returns to a known state. Faults are recorded and not
raised, so that later sequences run too.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from support.soak.frame import Outcome
from support.soak.sleep_rig import BODIES, CONTENTS, NAMES, SleepRig
from support.soak.traffic import BAD
from support.worker.leftovers import left_at_end

LENGTH = 14
MOST_WRONG = 20
# A rank may be killed in one of so many sequences, and the server in another: a new process imports torch for many seconds.
ONCE_IN = {"lose_rank": 3, "kill_server": 20}

EITHER, LEVELS, POLICIES = (False, True), ("HostMemory", "Discard"), ("AlwaysAwake", "Asleep", "OnIdle")
SAID = (None, None, None, *POLICIES)
SOME_TAGS = [[*tags] for size in (1, 2, 3) for tags in permutations(("weights", "adapters", "caches"), size)]
NAMED = ([], *([name] for name in NAMES))
HUNDREDTHS_S = [hundredths / 100 for hundredths in range(41)]
# Requests that come with a step. Some sequences have no step that asks, but every sequence needs requests.
COMPANY = {"company": (0, 1, 1, 3)}
# The steps, which are methods of the rig, with the choices for each argument.
STEPS: dict[str, dict[str, Sequence[Any]]] = {
    "ask": {"body": range(len(BODIES)), "names": NAMED, "count": range(1, 7), "stream": EITHER},
    "leave": {"body": (1,), "names": NAMED, "gone_after_s": HUNDREDTHS_S[1:], "stream": EITHER},
    "ask_wrongly": {"bad": BAD},
    "sleep": COMPANY
    | {"level": LEVELS, "mode": ("Wait", "Abort"), "deadlineSeconds": (0.05, 20.0), "ifIdleSince": (None, None, 0.0, 0.2, 100.0)}
    | {"policy": SAID, "patient": EITHER},
    "sleep_by_the_last_id": COMPANY,
    "two_at_once": COMPANY | {"level": LEVELS, "first": ("sleep", "wake")},
    "wake": COMPANY | {"tags": [None] * len(SOME_TAGS) + SOME_TAGS, "policy": SAID},
    "declare": COMPANY | {"policy": POLICIES},
    "call": COMPANY | {"path": ("/v1/pause", "/v1/resume")},
    "put": COMPANY | {"name": NAMES, "content": range(CONTENTS)},
    "delete": COMPANY | {"name": NAMES},
    "lose_rank": COMPANY | {"rank": (0, 1), "number": (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)},
    "kill_server": COMPANY,
    "wait": COMPANY | {"seconds": HUNDREDTHS_S[:31]},
}


def sequence(rng: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the steps of a sequence: a policy, then steps of a random selection of kinds, so that each kind comes often."""
    yield "declare", {"policy": rng.choice(POLICIES)}
    names = [name for name in STEPS if rng.randrange(ONCE_IN.get(name, 1)) == 0]
    left = rng.sample(names, rng.randint(1, len(names)))
    for _ in range(LENGTH - 1):
        name = rng.choice(left or ["ask"])
        yield name, {argument: rng.choice(choices) for argument, choices in STEPS[name].items()}
        if name in ONCE_IN:
            left.remove(name)


def run_sleep(folder: Path, count: int, *, seed: int, limit_s: float, ranks: int = 2) -> Outcome:
    """Drive the worker through random sequences until `count` are done, `limit_s` is over, or MOST_WRONG faults are found. Files of the
    process are kept in `folder`."""
    rig = SleepRig(folder, ranks=ranks, seed=seed)
    with closing(rig.worker):
        rig.start()
        for done in rig.outcome.until(count, limit_s):
            for name, given in sequence(Random(seed * 100_000 + done)):
                rig.do(name, **given)
            rig.settle()
            if len(rig.outcome.wrong) >= MOST_WRONG:
                break
        rig.outcome.restarts += rig.worker.state()["restarts"]
        rig.outcome.wrong += left_at_end(rig.worker, folder / "tmp")
    return rig.outcome
