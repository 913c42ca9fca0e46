# SPDX-License-Identifier: Apache-2.0
"""The soak of sleep: random sequences of sleep, wake, requests, changes of adapters and policy, and killed ranks and servers.

A hypothesis state machine chooses what happens; all sequences share one worker, which each puts back into a known state. What is
wrong is taken down and not raised: a run in real time does not come again the same, so there is nothing to make smaller, and the
sequences after it are wanted too. The same seed chooses the same sequences.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from support.soak.frame import Asked, Outcome
from support.soak.sleep_rig import BODIES, CONTENTS, NAMES, SleepRig
from support.soak.traffic import BAD

STEPS = 14
MOST_WRONG = 20
# Of so many sequences one may kill a rank, and one the server: a new one imports torch for many seconds.
RANK_KILLED_IN = 3
SERVER_KILLED_IN = 20

POLICIES = st.sampled_from(["AlwaysAwake", "Asleep", "OnIdle"])
SAID = st.none() | POLICIES
TAGS = st.none() | st.lists(st.sampled_from(["weights", "adapters", "caches"]), min_size=1, max_size=3, unique=True)
LEVELS = st.sampled_from(["HostMemory", "Discard"])
MODES = st.sampled_from(["Wait", "Abort"])
DEADLINES, IDLE = st.sampled_from([0.05, 20.0]), st.sampled_from([None, None, 0.0, 0.2, 100.0])
# Requests that come at the same time: hypothesis leaves whole rules out of a sequence, but no sequence is of use without requests.
COMPANY = st.sampled_from([0, 1, 1, 3])
NAMED = st.lists(st.sampled_from(NAMES), max_size=1)


class Sequence(RuleBasedStateMachine):
    """One sequence on the worker of `rig`."""

    rig: SleepRig
    seen: int

    def __init__(self) -> None:
        super().__init__()
        self.number = self.rig.outcome.sequences
        # The first that hypothesis makes is always the least there is, whatever the seed; it is left out.
        self.idle = self.seen == 0
        type(self).seen += 1
        # What hypothesis may choose must depend on nothing but on what it chose before.
        self.rank_kills = self.server_kills = 0
        self.slept = False

    def _do(self, what: str, work: Any, company: int = 0) -> None:
        """One step, together with so many requests."""

        def both() -> None:
            for number in range(company):
                self.rig.ask(number % len(BODIES), [])
            work()

        if not self.idle:
            self.rig.do(f"{what} (+{company})" if company else what, both)

    @initialize(policy=POLICIES, rank=st.integers(1, RANK_KILLED_IN), server=st.integers(1, SERVER_KILLED_IN))
    def begin(self, policy: str, rank: int, server: int) -> None:
        self.rank_kills, self.server_kills = int(rank == 2), int(server == 7)
        self._do(f"declare {policy}", lambda: self.rig.declare(policy))

    @rule(body=st.integers(0, len(BODIES) - 1), names=NAMED, count=st.integers(1, 6), stream=st.booleans())
    def ask(self, body: int, names: list[str], count: int, stream: bool) -> None:
        ask = partial(self.rig.ask, body, names, stream=stream)
        self._do(f"ask {count} of {body} {names} {stream=}", lambda: [ask() for _ in range(count)])

    @rule(names=NAMED, after_s=st.floats(0.01, 0.4), stream=st.booleans())
    def leave(self, names: list[str], after_s: float, stream: bool) -> None:
        self._do(f"leave after {after_s:.2f} s", lambda: self.rig.ask(1, names, stream=stream, gone_after_s=after_s))

    @rule(number=st.integers(0, len(BAD) - 1))
    def ask_wrongly(self, number: int) -> None:
        body, status = BAD[number]
        self._do(f"wrong {number}", lambda: self.rig.asking.send(Asked(None, [], time.monotonic(), expected=status), body))

    @rule(level=LEVELS, mode=MODES, deadlineSeconds=DEADLINES, ifIdleSince=IDLE, policy=SAID, patient=st.booleans(), company=COMPANY)
    def sleep(self, patient: bool, company: int, **body: Any) -> None:
        self.slept = True
        body |= {"operationId": f"{self.number}-{len(self.rig.trace)}"}
        self._do(f"sleep {body} {patient=}", lambda: self.rig.sleep(body, patient=patient), company)

    @precondition(lambda self: self.slept)
    @rule(company=COMPANY)
    def sleep_again_by_the_same_id(self, company: int) -> None:
        self._do("sleep by the same id", lambda: self.rig.sleep(self.rig.last_sleep), company)

    @rule(level=LEVELS, first=st.sampled_from(["sleep", "wake"]), company=COMPANY)
    def two_at_once(self, level: str, first: str, company: int) -> None:
        def both() -> None:
            with ThreadPoolExecutor(2) as threads:
                one = threads.submit(self.rig.wake if first == "wake" else self.rig.sleep, {})
                other = threads.submit(self.rig.sleep, {"level": level})
                one.result(), other.result()

        self._do(f"both {first} and sleep {level}", both, company)

    @rule(tags=TAGS, policy=SAID, company=COMPANY)
    def wake(self, tags: list[str] | None, policy: str | None, company: int) -> None:
        self._do(f"wake {tags} {policy}", lambda: self.rig.wake({"tags": tags, "policy": policy}), company)

    @rule(policy=POLICIES, company=COMPANY)
    def declare(self, policy: str, company: int) -> None:
        self._do(f"declare {policy}", lambda: self.rig.declare(policy), company)

    @rule(path=st.sampled_from(["/v1/pause", "/v1/resume"]), company=COMPANY)
    def pause_or_resume(self, path: str, company: int) -> None:
        self._do(path.removeprefix("/v1/"), lambda: self.rig.call(path, {}), company)

    @rule(name=st.sampled_from(NAMES), content=st.integers(0, CONTENTS - 1), company=COMPANY)
    def put(self, name: str, content: int, company: int) -> None:
        self._do(f"put {name} {content}", lambda: self.rig.put(name, content), company)

    @rule(name=st.sampled_from(NAMES), company=COMPANY)
    def delete(self, name: str, company: int) -> None:
        self._do(f"delete {name}", lambda: self.rig.put(name, None), company)

    @precondition(lambda self: self.rank_kills > 0)
    @rule(rank=st.integers(0, 1), number=st.sampled_from([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]), company=COMPANY)
    def lose_rank(self, rank: int, number: signal.Signals, company: int) -> None:
        self.rank_kills -= 1
        self._do(f"{number.name} {rank}", lambda: self.rig.signal_rank(rank, number), company)

    @precondition(lambda self: self.server_kills > 0)
    @rule(company=COMPANY)
    def kill_server(self, company: int) -> None:
        self.server_kills -= 1
        self._do("kill-server", self.rig.kill_server, company)

    @rule(seconds=st.floats(0.0, 0.3), company=COMPANY)
    def wait(self, seconds: float, company: int) -> None:
        self._do(f"wait {seconds:.2f}", lambda: time.sleep(seconds), company)

    def teardown(self) -> None:
        if not self.idle:
            self.rig.settle()


def run_sleep(folder: Path, *, seed: int, count: int, limit_s: float, ranks: int = 2) -> Outcome:
    """The soak; `folder` is for the worker's files."""
    rig = SleepRig(folder, ranks=ranks, seed=seed)
    try:
        rig.begin()
        for done in rig.outcome.until(count, limit_s):
            _run_one(rig, seed * 100_000 + done)
            if len(rig.outcome.wrong) >= MOST_WRONG:
                break
        rig.end()
    finally:
        rig.close()
    return rig.outcome


def _run_one(rig: SleepRig, number: int) -> None:
    """One sequence of that seed. Of many in one run hypothesis makes five in six by small changes of the one before."""
    machine = type("SequenceOfThisSeed", (Sequence,), {"rig": rig, "seen": 0})
    phases, checks = [Phase.generate], list(HealthCheck)
    options = settings(max_examples=2, stateful_step_count=STEPS, phases=phases, deadline=None, database=None, suppress_health_check=checks)
    run_state_machine_as_test(with_seed(number)(machine), settings=options)
