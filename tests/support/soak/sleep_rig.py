# SPDX-License-Identifier: Apache-2.0
"""The worker that the sequences of `soak_sleep` share: what is done to it, what is known of it, and how it is put back.

Nothing here decides what to do next. What is found wrong goes into the outcome with the sequence it happened in, and after a
hang the worker is replaced, so that the sequences after it mean something.
"""

import contextlib
import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from support.soak.adapters import Spell, write_contents
from support.soak.adapters import _digest as digest_of_file
from support.soak.adapters import _pixels as pixels
from support.soak.sleep_checks import consistent, nothing_resident
from support.soak.sleep_requests import BODIES, Asking, Excuse, Judge, Times
from support.worker.leftovers import ENDED_WITHIN_S, Footprint, footprint, left_at_end, left_over
from support.worker.process import START_TIMEOUT_S, WorkerProcess, descendants, process_exists

CONTENTS = 4
NAMES = ("style-0", "style-1", "style-2")
MAX_HELD = 12
HOLD_S = 40.0
# A sleep, a wake and a restart of ranks take two seconds at most on two idle cores.
SETTLED_WITHIN_S = 60.0
ANSWERED_WITHIN_S = HOLD_S + 20.0
# What a call may be refused with, while another operation runs or ranks are lost.
SLEEP_REFUSALS = frozenset({"Conflict", "Busy", "Starting"})
REFUSALS = {"/v1/pause": SLEEP_REFUSALS | {"Asleep", "Timeout", "RankFailed"}}
PATIENCE_S = 5.0
LEFT_OVER_EVERY = 20
MOST_WRONG = 20


@dataclass
class SleepOutcome:
    """What one run came to."""

    seed: int
    sequences: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    images: int = 0
    while_cold: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    # In which states the invariants were looked at.
    states: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    server_kills: int = 0
    worst_difference: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1), "slowest_s": round(self.slowest_s, 1)})


class SleepRig:
    """One worker of some ranks, with its desired file and its record of sleep in `folder`."""

    def __init__(self, folder: Path, *, ranks: int, seed: int) -> None:
        self.folder = folder
        self.outcome = SleepOutcome(seed)
        self.desired = folder / "desired.json"
        self.contents = write_contents(folder, CONTENTS, seed)
        (folder / "tmp").mkdir()
        options = (f"--desired={self.desired}", f"--state-dir={folder / 'state'}", "--max-restarts=100000", "--max-batch-size=4")
        self.write_policy("AlwaysAwake")
        self.worker = WorkerProcess(ranks=ranks, options=options, env={"TMPDIR": str(folder / "tmp")})
        self.asking = Asking(lambda: self.worker.url, timeout_s=ANSWERED_WITHIN_S)
        self.changing = ThreadPoolExecutor(1)
        self.times = Times()
        self.spells: dict[str, list[Spell]] = {name: [Spell(None, 0.0)] for name in NAMES}
        self.references: dict[tuple[int, tuple[int, ...]], Any] = {}
        self.policy = "AlwaysAwake"
        self.declared = "AlwaysAwake"
        self.last_sleep: dict[str, Any] | None = None
        # What must not wake by itself: asleep, under a policy that says so, and nobody has asked since.
        self.stays_asleep = False
        self.trace: list[str] = []
        self.broken = False
        self._last_operation = ""
        self._processes = 0
        self._before: Footprint = {}

    # --- begin and end --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the worker and make every image that may be asked for alone."""
        self.worker.start()
        self.worker.wait_ready()
        for content in range(CONTENTS):
            self._must(self.worker.put_adapter("reference", self.contents[content]))
            for body in range(len(BODIES)):
                self._make_alone(body, (content,), ["reference"])
        self._must(self.worker.delete_adapter("reference"))
        for body in range(len(BODIES)):
            self._make_alone(body, (), [])
        self._known_adapters()
        self._count()

    def end(self) -> None:
        """End the worker: with 0, and nothing of it stays."""
        self.outcome.restarts += self.worker.state()["restarts"]
        self.outcome.wrong += left_at_end(self.worker, self.folder / "tmp")

    def close(self) -> None:
        """Whatever happened."""
        self.worker.close()
        self.asking.close()
        self.changing.shutdown(cancel_futures=True)

    def _make_alone(self, body: int, contents: tuple[int, ...], names: list[str]) -> None:
        answer = self.worker.request_images(**BODIES[body], lora=[{"name": name} for name in names])
        self._must(answer)
        self.references[body, contents] = pixels(answer.json())

    def _must(self, answer: Any) -> None:
        assert answer.status_code == 200, answer.text

    # --- one thing of a sequence ----------------------------------------------------------------------------------------

    def do(self, what: str, work: Callable[[], object]) -> None:
        """One step: done, taken down, and looked at. A worker that does not answer is wrong, and is replaced after the sequence."""
        if self.broken:
            return
        self.trace.append(what)
        self.outcome.steps[what.split()[0]] += 1
        try:
            work()
            self.look()
        except (AssertionError, httpx2.HTTPError) as error:
            self.broken = True
            self._wrong(f"{type(error).__name__}: {error}"[:1500])

    def look(self) -> None:
        """The invariants."""
        document = self.worker.state()
        self.outcome.states[document["state"]] += 1
        self._count_operation(document["lastOperation"])
        for found in [*consistent(document, max_held=MAX_HELD), *nothing_resident(self.worker, document)]:
            self._wrong(found)
        if self.stays_asleep and document["state"] in ("ready", "waking"):
            self._wrong(f"it is {document['state']}, and nobody woke it")
            self.stays_asleep = False
        if document["state"] == "asleep" and document["operation"] is None and document["policy"] == self.policy == "Asleep":
            self.stays_asleep = True
        if document["state"] == "ready" and document["operation"] is None and not self.times.holds(Excuse.DOWN):
            self.times.end(Excuse.KILLED)

    def _count_operation(self, last: dict[str, Any] | None) -> None:
        if last is not None and last["operationId"] != self._last_operation:
            self._last_operation = last["operationId"]
            self.outcome.operations[f"{last['kind']} {last['level'] or ''} {(last['error'] or {}).get('code', '')}".strip()] += 1

    def call(self, path: str, body: dict[str, Any]) -> Any:
        """A sleep, wake, pause or resume; its code must be one that the worker's state allows."""
        answer = self.worker.control("POST", path, json={"operationId": uuid.uuid4().hex, **body}, timeout=20.0)
        document = answer.json() if answer.content else {}
        code = str(document.get("code", ""))
        self.outcome.calls[f"{path.rpartition('/')[2]} {answer.status_code} {code}".strip()] += 1
        if answer.status_code not in (200, 202) and code not in REFUSALS.get(path, SLEEP_REFUSALS):
            self._wrong(f"{path} {body}: {answer.status_code} {document}")
        if code == "Conflict" and not document["details"].get("operationId"):
            self._wrong(f"{path}: a conflict that does not name the operation in progress: {document}")
        return answer

    # --- sleep and wake -------------------------------------------------------------------------------------------------

    def sleep(self, body: dict[str, Any], *, patient: bool = False) -> None:
        """Ask for a sleep; under a policy other than OnIdle requests may be refused until it is awake again. The patient let it end,
        or the steps after it would find it draining, and never asleep."""
        policy = body.get("policy") or self.policy
        if policy != "OnIdle":
            self.times.begin(Excuse.ASKED)
        self.times.begin(Excuse.ENDED)
        self.last_sleep = body
        if self.call("/v1/sleep", body).status_code in (200, 202):
            self._policy_is(body.get("policy"))
        until = time.monotonic() + PATIENCE_S
        while patient and self.worker.state()["operation"] is not None and time.monotonic() < until:
            time.sleep(0.02)

    def wake(self, body: dict[str, Any]) -> None:
        """Ask for a wake."""
        self.stays_asleep = False
        if self.call("/v1/wake", body).status_code in (200, 202):
            self._policy_is(body.get("policy"))

    def declare(self, policy: str) -> None:
        """A policy in the desired file. It counts where it is another than the file had, or else what a call said last does."""
        self.write_policy(policy)
        if policy != self.declared:
            self.declared = policy
            self._policy_is(policy)

    def write_policy(self, policy: str) -> None:
        """The desired file, put in place at once as a mounted ConfigMap is."""
        cold = {"mode": "Hold", "maxHeld": MAX_HELD, "holdTimeoutSeconds": HOLD_S}
        replacement = self.folder / "desired.new"
        replacement.write_text(json.dumps({"sleep": {"policy": policy}, "coldRequests": cold, "adapters": []}))
        replacement.rename(self.desired)

    def _policy_is(self, policy: str | None) -> None:
        if policy is None:
            return
        self.stays_asleep = False
        if policy != "OnIdle" and self.worker.state()["state"] != "ready":
            self.times.begin(Excuse.ASKED)
        self.policy = policy

    # --- adapters -------------------------------------------------------------------------------------------------------

    def put(self, name: str, content: int) -> None:
        """Put or replace an adapter, in a thread: one after the other."""
        self.changing.submit(self._change, name, content)

    def delete(self, name: str) -> None:
        """Take one away, likewise."""
        self.changing.submit(self._change, name, None)

    def _change(self, name: str, content: int | None) -> None:
        spells, what = self.spells[name], "delete" if content is None else "put"
        spells.append(Spell(content, time.monotonic()))
        try:
            answer = self.worker.delete_adapter(name) if content is None else self.worker.put_adapter(name, self.contents[content])
        except httpx2.HTTPError as error:
            if not self.times.holds(Excuse.DOWN):
                self._wrong(f"{what} {name}: {type(error).__name__}")
            return
        document = answer.json() if answer.content else {}
        code = str(document.get("code", ""))
        self.outcome.calls[f"{what} {answer.status_code} {code}".strip()] += 1
        if answer.status_code == 200:
            for spell in spells[:-1]:
                spell.ends = min(spell.ends, time.monotonic())
        elif not document.get("retryable") and code != "NotFound":
            # Refused for now it may have been done all the same: both may be.
            self._wrong(f"{what} {name}: {answer.status_code} {document}")

    def _known_adapters(self) -> None:
        """Every name stands for the content of its number again."""
        for number, name in enumerate(NAMES):
            self._must(self.worker.put_adapter(name, self.contents[number]))
            self.spells[name] = [Spell(number, time.monotonic())]

    # --- faults ---------------------------------------------------------------------------------------------------------

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Kill or stop one."""
        pids = [one["pid"] for one in self.worker.state()["ranks"] if one["pid"]]
        if pids:
            self.times.begin(Excuse.KILLED)
            with contextlib.suppress(ProcessLookupError):  # its group is being ended already
                os.kill(pids[rank % len(pids)], number)

    def kill_server(self) -> None:
        """Kill it and start it again over what it left: asleep where it was, unless the declared policy is to be awake."""
        document = self.worker.state()
        pids = [self.worker.pid, *descendants(self.worker.pid)]
        self.times.begin(Excuse.DOWN)
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait_exit(10)
        self.worker.wait_until(
            lambda: not any(process_exists(pid) for pid in pids), what="gone with all its processes", timeout_s=ENDED_WITHIN_S
        )
        self.changing.submit(lambda: None).result(ANSWERED_WITHIN_S)
        self.asking.wait(10)
        for name in NAMES:
            self.spells[name] = [*self.spells[name], Spell(None, time.monotonic())]
        self.outcome.server_kills += 1
        self.outcome.restarts += document["restarts"]
        self.worker.start()
        self.times.end(Excuse.DOWN)
        self.policy, self.stays_asleep = self.declared, False
        was_asleep = document["state"] == "asleep" and document["operation"] is None
        if self.declared == "Asleep" or (was_asleep and self.declared == "OnIdle"):
            self.times.begin(Excuse.ASKED)
            found = self.worker.wait_state("asleep", START_TIMEOUT_S)
        else:
            found = self.worker.wait_state("ready", START_TIMEOUT_S)
        for name in NAMES:
            self.spells[name] = [Spell(None, time.monotonic())]
        if was_asleep and found["state"] == "asleep":
            self._slept_through(found)
        self._count()

    def _slept_through(self, document: dict[str, Any]) -> None:
        if document["restarts"] or document["load"]["stage"] != "Done":
            self._wrong(f"it came back asleep with {document['restarts']} restarts, at {document['load']['stage']}")

    # --- back to what is known ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The end of a sequence: awake, every request answered and judged, adapters as they were, nothing left."""
        self.outcome.sequences += 1
        try:
            if not self.broken:
                self._settle()
        except (AssertionError, httpx2.HTTPError) as error:
            self.broken = True
            self._wrong(f"{type(error).__name__}: {error}"[:3000])
        if self.broken:
            self._replace()
        self.trace, self.last_sleep = [], None

    def _settle(self) -> None:
        self.changing.submit(lambda: None).result(ANSWERED_WITHIN_S)
        self.stays_asleep = False
        self.declare("AlwaysAwake")
        self.call("/v1/resume", {})
        self.worker.wait_for(self._is_awake, what="awake again", timeout_s=SETTLED_WITHIN_S)
        self._judge()
        self.times.end(Excuse.ASKED)
        self.times.end(Excuse.ENDED)
        self.times.end(Excuse.KILLED)
        self._known_adapters()
        self._check_left_over()

    def _is_awake(self) -> bool:
        """Also by a call, as one may have said another policy since the file did."""
        document = self.worker.state()
        state, running = document["state"], document["operation"] is not None
        if state == "draining" or (not running and (state == "asleep" or document["policy"] != "AlwaysAwake")):
            self.wake({"policy": "AlwaysAwake"})
        return bool(state == "ready" and not running and document["policy"] == "AlwaysAwake")

    def _judge(self) -> None:
        outcome = self.outcome
        digests = {digest_of_file(path / "adapter_model.safetensors"): number for number, path in enumerate(self.contents)}
        judge = Judge(self.references, digests, self.spells, MAX_HELD)
        for asked in self.asking.answers(ANSWERED_WITHIN_S):
            outcome.asked += 1
            if why := judge.why_wrong(asked, self.times):
                self._wrong(why)
            elif asked.status == 200:
                outcome.images += 1
                outcome.while_cold += bool(asked.held)
                outcome.worst_difference = max(outcome.worst_difference, asked.worst)
                outcome.slowest_s = max(outcome.slowest_s, asked.ended - asked.begun)
            else:
                outcome.refused[asked.code if not asked.gone else "gone"] += 1

    def _count(self) -> None:
        self._before = footprint(self.worker)
        self._processes = len(self._before)

    def _check_left_over(self) -> None:
        def none_else() -> bool:
            return len(descendants(self.worker.pid)) + 1 == self._processes

        self.worker.wait_for(none_else, what="left with its own processes only", timeout_s=10)
        if self.outcome.sequences % LEFT_OVER_EVERY == 0:
            for found in left_over(self.worker, self._before):
                self._wrong(found)

    def _replace(self) -> None:
        """A new worker, after one that cannot be trusted any more."""
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait_exit(10)
        self.asking.answers(ANSWERED_WITHIN_S)
        for path in (self.folder / "state").glob("*"):
            path.unlink()
        self.write_policy("AlwaysAwake")
        self.policy = self.declared = "AlwaysAwake"
        self.times = Times()
        self.worker.start()
        self.worker.wait_ready()
        self._known_adapters()
        self._count()
        self.broken = False

    def _wrong(self, what: str) -> None:
        self.outcome.wrong.append(f"sequence {self.outcome.sequences} after {self.trace}: {what}")
