# SPDX-License-Identifier: Apache-2.0
"""The worker that the sequences of `soak.sleep` share: the actions on it, its expected state, and its return to a known state.

This file decides no step. Faults go into the outcome with their sequence. After a hang the worker is replaced, so that later sequences are
meaningful.
"""

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from support.soak.adapters import QUICK, QUICKER, References, Spell, write_contents
from support.soak.frame import Asked, Asking, Outcome, signal_rank
from support.soak.sleep_judge import Excuse, Times, consistent, nothing_resident, why_wrong
from support.worker.leftovers import ENDED_WITHIN_S, footprint, left_over
from support.worker.process import START_TIMEOUT_S, WorkerProcess, descendants, process_exists
from support.worker.sleep_rig import write_desired

CONTENTS = 4
NAMES = ("style-0", "style-1", "style-2")
BODIES = (QUICK, QUICKER | {"num_inference_steps": 9})
MAX_HELD, HOLD_S = 12, 40.0
# A sleep, a wake and a restart of ranks take two seconds at most on two idle cores.
SETTLED_WITHIN_S = 60.0
ANSWERED_WITHIN_S = HOLD_S + 20.0
# The codes that may refuse a call while another operation runs or ranks are lost.
SLEEP_REFUSALS = frozenset({"Conflict", "Busy", "Starting"})
REFUSALS = {"/v1/pause": SLEEP_REFUSALS | {"Asleep", "Timeout", "RankFailed"}}
PATIENCE_S = 5.0
LEFT_OVER_EVERY = 20


class SleepRig(References):
    """A worker of several ranks, with its desired file and its record of sleep in `folder`.

    Real: the server and its ranks, their memory, and the adapters. Not real: the kubelet, which is `declare` and `kill_server`.
    """

    def __init__(self, folder: Path, *, ranks: int, seed: int) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        options = (f"--desired={folder / 'desired.json'}", f"--state-dir={folder / 'state'}", "--max-restarts=100000", "--max-batch-size=4")
        worker = WorkerProcess(ranks=ranks, options=options, env={"TMPDIR": str(folder / "tmp")})
        counts = "asked images while_cold restarts server_kills worst_difference slowest_s"
        outcome = Outcome(seed, counts=counts, tallies="steps refused calls operations states")
        super().__init__(worker, write_contents(folder, CONTENTS, seed), BODIES, outcome)
        self._asking, self._changing = Asking(lambda: worker.url, clients=40, timeout_s=ANSWERED_WITHIN_S), ThreadPoolExecutor(1)
        self._trace: list[str] = []
        self._last_sleep: dict[str, Any] = {}
        self._last_operation = ""

    def start(self) -> None:
        """Start the worker, and make the reference images if there are none yet."""
        self._times, self._broken = Times(), False
        self._policy = self._declared = "AlwaysAwake"
        self.declare("AlwaysAwake")
        # True: the worker must not wake by itself. It sleeps by its policy, and no request has come since.
        self._stays_asleep = False
        self.worker.start()
        self.worker.wait_ready()
        if not self.alone:
            self.make_references()
        self.put_all(NAMES)
        self._before = footprint(self.worker)

    def do(self, step: str, *, company: int = 0, **given: Any) -> None:
        """Do a step together with so many requests, record it, and check the worker, unless it has to be replaced first."""
        if not self._broken:
            self._trace.append(f"{step} {given} (+{company})")
            self.outcome.steps[step] += 1
            with self._trying():
                for number in range(company):
                    self.ask(number % len(BODIES), [])
                getattr(self, step)(**given)
                self._look()

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Record a worker that does not answer as a fault, to be replaced after the sequence."""
        try:
            yield
        except (AssertionError, TimeoutError, httpx2.HTTPError) as error:
            self._broken = True
            self._wrong(f"{type(error).__name__}: {error}"[:3000])

    def _look(self) -> None:
        """Read the state document, and record faults: contradictions in it, resident weights of sleeping ranks, and a worker that woke
        by itself."""
        document = self.worker.state()
        state, last, resting = document["state"], document["lastOperation"], document["operation"] is None
        self.outcome.states[state] += 1
        if last is not None and last["operationId"] != self._last_operation:
            self._last_operation = last["operationId"]
            self.outcome.operations[f"{last['kind']} {last['level'] or ''} {(last['error'] or {}).get('code', '')}".strip()] += 1
        self._wrong(*consistent(document, max_held=MAX_HELD), *nothing_resident(self.worker, document))
        if self._stays_asleep and state in ("ready", "waking"):
            self._wrong(f"it is {state}, and nobody woke it")
            self._stays_asleep = False
        self._stays_asleep |= state == "asleep" and resting and document["policy"] == self._policy == "Asleep"
        if state == "ready" and resting and not self._times.holds(Excuse.DOWN):
            self._times.end(Excuse.KILLED)

    def ask(self, body: int, names: list[str], *, count: int = 1, stream: bool = False, gone_after_s: float | None = None) -> None:
        """Ask for images in threads, with adapters; the client may go away before its image is there."""
        sent: dict[str, Any] = {**BODIES[body], "lora": [{"name": name} for name in names], "stream": stream}
        if stream:
            sent["stream_options"] = {"include_progress": True}
        for _ in range(count):
            self._asking.send(Asked(body, names, time.monotonic(), sent, gone_after_s=gone_after_s))

    leave = ask

    def ask_wrongly(self, bad: tuple[dict[str, Any], int]) -> None:
        """Send a wrong request without waiting. `bad` is its body and the status with which it must be refused."""
        self._asking.send(Asked(None, [], time.monotonic(), *bad))

    def call(self, path: str, body: dict[str, Any] | None = None) -> bool:
        """Make a sleep, wake, pause or resume call; a refusal must have a code that the state allows. Return whether it was accepted."""
        answer = self.worker.control("POST", path, json={"operationId": uuid.uuid4().hex, **(body or {})}, timeout=20.0)
        taken, code, document = answer.status_code in (200, 202), *self._count(path.rpartition("/")[2], answer)
        if not taken and code not in REFUSALS.get(path, SLEEP_REFUSALS):
            self._wrong(f"{path} {body}: {answer.status_code} {document}")
        if code == "Conflict" and not document["details"].get("operationId"):
            self._wrong(f"{path}: a conflict that does not name the operation in progress: {document}")
        return taken

    def _count(self, what: str, answer: httpx2.Response) -> tuple[str, dict[str, Any]]:
        document = answer.json() if answer.content else {}
        code = str(document.get("code", ""))
        self.outcome.calls[f"{what} {answer.status_code} {code}".strip()] += 1
        return code, document

    def sleep(self, *, patient: bool = False, **body: Any) -> None:
        """Ask for a sleep. With `patient` wait for its end: otherwise later steps would find the worker draining, never asleep."""
        self._times.begin(Excuse.ASKED)
        self._last_sleep = {"operationId": uuid.uuid4().hex, **body}
        if self.call("/v1/sleep", self._last_sleep):
            self._policy_is(body.get("policy"))
        until = time.monotonic() + PATIENCE_S
        while patient and self.worker.state()["operation"] is not None and time.monotonic() < until:
            time.sleep(0.02)

    def sleep_by_the_last_id(self) -> None:
        """Repeat the sequence's last sleep call; if there is none, make a first one."""
        self.sleep(**self._last_sleep)

    def wake(self, **body: Any) -> None:
        """Start waking the model, with `body` as the call's fields, and return before it is awake.

        If the worker accepts the call, note the policy in it as the expected one.
        """
        self._stays_asleep = False
        if self.call("/v1/wake", body):
            self._policy_is(body.get("policy"))

    def two_at_once(self, first: str, level: str) -> None:
        """Make a sleep call, and at the same time another one or a wake call."""
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda step: step(), (getattr(self, first), lambda: self.sleep(level=level))))

    def declare(self, policy: str) -> None:
        """Put a policy in the desired file. It counts only where it differs from the file's former one; else the last call's counts."""
        cold = {"mode": "Hold", "maxHeld": MAX_HELD, "holdTimeoutSeconds": HOLD_S}
        write_desired(self.folder, policy, coldRequests=cold, adapters=[])
        if policy != self._declared:
            self._declared = policy
            self._policy_is(policy)

    def _policy_is(self, policy: str | None) -> None:
        if policy is not None:
            self._policy, self._stays_asleep = policy, False
            if policy != "OnIdle" and self.worker.state()["state"] != "ready":
                self._times.begin(Excuse.ASKED)

    def put(self, name: str, content: int | None = None) -> None:
        """Put or replace an adapter, or delete it, in a thread that does one change after the other."""
        self._changing.submit(self._change, name, content)

    delete = put

    def _change(self, name: str, content: int | None) -> None:
        what = "delete" if content is None else "put"
        try:
            answer = self.change(name, content)
        except httpx2.HTTPError as error:
            if not self._times.holds(Excuse.DOWN):
                self._wrong(f"{what} {name}: {type(error).__name__}")
            return
        code, document = self._count(what, answer)
        if answer.status_code != 200 and not document.get("retryable") and code != "NotFound":
            self._wrong(f"{what} {name}: {answer.status_code} {document}")

    def lose_rank(self, rank: int, number: signal.Signals) -> None:
        """Kill or stop a rank."""
        self._times.begin(Excuse.KILLED)
        signal_rank(self.worker, rank, number)

    def kill_server(self) -> None:
        """Kill the server and start it again over its files: it must come back asleep where it slept, unless the policy is to be awake."""
        document = self.worker.state()
        pids = [self.worker.pid, *descendants(self.worker.pid)]
        self._times.begin(Excuse.DOWN)
        self._kill()
        self.worker.wait_until(lambda: not any(map(process_exists, pids)), what="gone with all of it", timeout_s=ENDED_WITHIN_S)
        self._changing.submit(lambda: None).result(ANSWERED_WITHIN_S)
        self._asking.wait(10)
        for spells in self.spells.values():
            spells.append(Spell(None, time.monotonic()))
        self.outcome.server_kills += 1
        self.outcome.restarts += document["restarts"]
        self.worker.start()
        self._times.end(Excuse.DOWN)
        self._policy, self._stays_asleep = self._declared, False
        was_asleep = document["state"] == "asleep" and document["operation"] is None
        comes_asleep = self._declared == "Asleep" or (was_asleep and self._declared == "OnIdle")
        if comes_asleep:
            self._times.begin(Excuse.ASKED)
        found = self.worker.wait_state("asleep" if comes_asleep else "ready", START_TIMEOUT_S)
        for name in NAMES:
            self.changed(name)
        if was_asleep and comes_asleep and (found["restarts"] or found["load"]["stage"] != "Done"):
            self._wrong(f"it came back asleep with {found['restarts']} restarts, at {found['load']['stage']}")
        self._before = footprint(self.worker)

    def _kill(self) -> None:
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait_exit()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def settle(self) -> None:
        """End a sequence: wake the worker, judge every request, restore adapters and check for leaks; or replace the worker."""
        self.outcome.done += 1
        with self._trying():
            self._settle()
        if self._broken:
            self._kill()
            self._asking.answers(ANSWERED_WITHIN_S)
            for path in (self.folder / "state").glob("*"):
                path.unlink()
            self.start()
        self._trace, self._last_sleep = [], {}

    def _settle(self) -> None:
        if self._broken:
            return
        self._changing.submit(lambda: None).result(ANSWERED_WITHIN_S)
        self._stays_asleep = False
        self.declare("AlwaysAwake")
        self.call("/v1/resume")
        self.worker.wait_for(self._is_awake, what="awake again", timeout_s=SETTLED_WITHIN_S)
        self._judge()
        self._times.end(Excuse.ASKED, Excuse.KILLED)
        self.put_all(NAMES)
        own = len(self._before) - 1
        self.worker.wait_for(lambda: len(descendants(self.worker.pid)) == own, what="left with its own processes only", timeout_s=60)
        if self.outcome.done % LEFT_OVER_EVERY == 0:
            self._wrong(*left_over(self.worker, self._before))

    def _is_awake(self) -> bool:
        """Return whether the worker is awake by policy and idle. Otherwise wake it: a call may have set another policy than the file."""
        document = self.worker.state()
        state, running = document["state"], document["operation"] is not None
        if state == "draining" or (not running and (state == "asleep" or document["policy"] != "AlwaysAwake")):
            self.wake(policy="AlwaysAwake")
        return bool(state == "ready" and not running and document["policy"] == "AlwaysAwake")

    def _judge(self) -> None:
        outcome, answered = self.outcome, self._asking.answers(ANSWERED_WITHIN_S)
        outcome.asked += len(answered)
        for asked in answered:
            asked.beside = sum(other.begun <= asked.ended and other.ended >= asked.begun for other in answered) - 1
            if why := why_wrong(asked, self._times, references=self, max_held=MAX_HELD):
                self._wrong(why)
            elif asked.status == 200:
                outcome.images += 1
                outcome.while_cold += bool(asked.held)
                outcome.slowest_s = max(outcome.slowest_s, asked.ended - asked.begun)
            else:
                outcome.refused[asked.code if asked.gone_after_s is None else "gone"] += 1

    def _wrong(self, *found: str) -> None:
        self.outcome.wrong += [f"sequence {self.outcome.done} after {self._trace}: {what}" for what in found]
