# SPDX-License-Identifier: Apache-2.0
"""The worker that the sequences of `soak.sleep` share: what is done to it, what is known of it, and how it is put back.

Nothing here decides what to do next. What is found wrong goes into the outcome with the sequence it happened in, and after a
hang the worker is replaced, so that the sequences after it mean something.
"""

import contextlib
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from support.soak.adapters import References, Spell, write_contents
from support.soak.frame import Asked, Asking, Outcome
from support.soak.sleep_judge import Excuse, Judge, Times, consistent, nothing_resident
from support.worker.leftovers import ENDED_WITHIN_S, footprint, left_at_end, left_over
from support.worker.process import START_TIMEOUT_S, WorkerProcess, descendants, process_exists
from support.worker.sleep_rig import write_desired

CONTENTS = 4
NAMES = ("style-0", "style-1", "style-2")
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a red digit seven", "seed": 1, "size": "32x32", "num_inference_steps": 4},
    {"prompt": "a blue digit two", "seed": 2, "size": "32x32", "num_inference_steps": 9},
)
MAX_HELD, HOLD_S = 12, 40.0
# A sleep, a wake and a restart of ranks take two seconds at most on two idle cores.
SETTLED_WITHIN_S = 60.0
ANSWERED_WITHIN_S = HOLD_S + 20.0
# What a call may be refused with, while another operation runs or ranks are lost.
SLEEP_REFUSALS = frozenset({"Conflict", "Busy", "Starting"})
REFUSALS = {"/v1/pause": SLEEP_REFUSALS | {"Asleep", "Timeout", "RankFailed"}}
PATIENCE_S = 5.0
LEFT_OVER_EVERY = 20


class SleepRig(References):
    """A worker of several ranks, with its desired file and its record of sleep in `folder`.

    Real: the server and its ranks, their memory, and the adapters. Not real: the kubelet, which is `write_policy` and `kill_server`.
    """

    def __init__(self, folder: Path, *, ranks: int, seed: int) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self.write_policy("AlwaysAwake")
        options = (f"--desired={folder / 'desired.json'}", f"--state-dir={folder / 'state'}", "--max-restarts=100000", "--max-batch-size=4")
        worker = WorkerProcess(ranks=ranks, options=options, env={"TMPDIR": str(folder / "tmp")})
        super().__init__(worker, write_contents(folder, CONTENTS, seed), BODIES)
        tallies = {name: Counter() for name in ("steps", "refused", "calls", "operations", "states")}
        counts = dict.fromkeys(("sequences", "asked", "images", "while_cold", "restarts", "server_kills", "worst_difference"), 0)
        self.outcome = Outcome(seed, "sequences", **counts, **tallies, slowest_s=0.0)
        self.asking, self._changing = Asking(lambda: worker.url, clients=40, timeout_s=ANSWERED_WITHIN_S), ThreadPoolExecutor(1)
        self.spells = {name: [Spell(None, 0.0)] for name in NAMES}
        self.times = Times()
        self.policy = self.declared = "AlwaysAwake"
        self.last_sleep: dict[str, Any] = {}
        # What must not wake by itself: asleep, under a policy that says so, and nobody has asked since.
        self.stays_asleep = False
        self.trace: list[str] = []
        self.broken, self._last_operation = False, ""

    def begin(self) -> None:
        """Start the worker and make every image that may be asked for alone."""
        self._start()
        self.make_references()
        self._before = footprint(self.worker)

    def _start(self) -> None:
        self.worker.start()
        self.worker.wait_ready()
        self.put_all(NAMES)
        self._before = footprint(self.worker)

    def end(self) -> None:
        """End the worker: with 0, and nothing of it stays."""
        self.outcome.restarts += self.worker.state()["restarts"]
        self.outcome.wrong += left_at_end(self.worker, self.folder / "tmp")

    def close(self) -> None:
        """End all of it, once nothing has to be right any more."""
        self.worker.close()
        self.asking.close()
        self._changing.shutdown(cancel_futures=True)

    def do(self, what: str, work: Callable[[], object]) -> None:
        """One step: done, taken down, and looked at. A worker that does not answer is wrong, and is replaced after the sequence."""
        if not self.broken:
            self.trace.append(what)
            self.outcome.steps[what.split()[0]] += 1
            self._try(work, self.look)

    def _try(self, *works: Callable[[], object]) -> None:
        try:
            for work in works:
                work()
        except (AssertionError, TimeoutError, httpx2.HTTPError) as error:
            self.broken = True
            self._wrong(f"{type(error).__name__}: {error}"[:3000])

    def look(self) -> None:
        """The invariants."""
        document = self.worker.state()
        state, last, resting = document["state"], document["lastOperation"], document["operation"] is None
        self.outcome.states[state] += 1
        if last is not None and last["operationId"] != self._last_operation:
            self._last_operation = last["operationId"]
            self.outcome.operations[f"{last['kind']} {last['level'] or ''} {(last['error'] or {}).get('code', '')}".strip()] += 1
        self._wrong(*consistent(document, max_held=MAX_HELD), *nothing_resident(self.worker, document))
        if self.stays_asleep and state in ("ready", "waking"):
            self._wrong(f"it is {state}, and nobody woke it")
            self.stays_asleep = False
        self.stays_asleep |= state == "asleep" and resting and document["policy"] == self.policy == "Asleep"
        if state == "ready" and resting and not self.times.holds(Excuse.DOWN):
            self.times.end(Excuse.KILLED)

    def ask(self, body: int, names: list[str], *, stream: bool = False, gone_after_s: float | None = None) -> None:
        """Ask for an image in a thread, with adapters; its client may go away before it is there."""
        sent = {**BODIES[body], "lora": [{"name": name} for name in names], "stream": stream}
        self.asking.send(Asked(body, names, time.monotonic()), sent, gone_after_s)

    def call(self, path: str, body: dict[str, Any]) -> Any:
        """A sleep, wake, pause or resume; its code must be one that the worker's state allows."""
        answer = self.worker.control("POST", path, json={"operationId": uuid.uuid4().hex, **body}, timeout=20.0)
        document = answer.json() if answer.content else {}
        code = self._count(path.rpartition("/")[2], answer.status_code, document)
        if answer.status_code not in (200, 202) and code not in REFUSALS.get(path, SLEEP_REFUSALS):
            self._wrong(f"{path} {body}: {answer.status_code} {document}")
        if code == "Conflict" and not document["details"].get("operationId"):
            self._wrong(f"{path}: a conflict that does not name the operation in progress: {document}")
        return answer

    def _count(self, what: str, status: int, document: dict[str, Any]) -> str:
        code = str(document.get("code", ""))
        self.outcome.calls[f"{what} {status} {code}".strip()] += 1
        return code

    def sleep(self, body: dict[str, Any], *, patient: bool = False) -> None:
        """Ask for a sleep; under a policy other than OnIdle requests may be refused until it is awake again. The patient let it end,
        or the steps after it would find it draining, and never asleep."""
        if (body.get("policy") or self.policy) != "OnIdle":
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
        write_desired(self.folder, policy, coldRequests=cold, adapters=[])

    def _policy_is(self, policy: str | None) -> None:
        if policy is not None:
            self.policy, self.stays_asleep = policy, False
            if policy != "OnIdle" and self.worker.state()["state"] != "ready":
                self.times.begin(Excuse.ASKED)

    def put(self, name: str, content: int | None) -> None:
        """Put, replace or take away an adapter, in a thread: one after the other."""
        self._changing.submit(self._change, name, content)

    def _change(self, name: str, content: int | None) -> None:
        what = "delete" if content is None else "put"
        try:
            answer = self.change(name, content)
        except httpx2.HTTPError as error:
            if not self.times.holds(Excuse.DOWN):
                self._wrong(f"{what} {name}: {type(error).__name__}")
            return
        document = answer.json() if answer.content else {}
        code = self._count(what, answer.status_code, document)
        if answer.status_code != 200 and not document.get("retryable") and code != "NotFound":
            self._wrong(f"{what} {name}: {answer.status_code} {document}")

    def _changes_done(self) -> None:
        self._changing.submit(lambda: None).result(ANSWERED_WITHIN_S)

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
        self.worker.wait_until(lambda: not any(map(process_exists, pids)), what="gone with all of it", timeout_s=ENDED_WITHIN_S)
        self._changes_done()
        self.asking.wait(10)
        for spells in self.spells.values():
            spells.append(Spell(None, time.monotonic()))
        self.outcome.server_kills += 1
        self.outcome.restarts += document["restarts"]
        self.worker.start()
        self.times.end(Excuse.DOWN)
        self.policy, self.stays_asleep = self.declared, False
        was_asleep = document["state"] == "asleep" and document["operation"] is None
        comes_asleep = self.declared == "Asleep" or (was_asleep and self.declared == "OnIdle")
        if comes_asleep:
            self.times.begin(Excuse.ASKED)
        found = self.worker.wait_state("asleep" if comes_asleep else "ready", START_TIMEOUT_S)
        self.spells = {name: [Spell(None, time.monotonic())] for name in NAMES}
        if was_asleep and comes_asleep and (found["restarts"] or found["load"]["stage"] != "Done"):
            self._wrong(f"it came back asleep with {found['restarts']} restarts, at {found['load']['stage']}")
        self._before = footprint(self.worker)

    def settle(self) -> None:
        """The end of a sequence: awake, every request answered and judged, adapters as they were, nothing left."""
        self.outcome.sequences += 1
        if not self.broken:
            self._try(self._settle)
        if self.broken:
            self._replace()
        self.trace, self.last_sleep = [], {}

    def _settle(self) -> None:
        self._changes_done()
        self.stays_asleep = False
        self.declare("AlwaysAwake")
        self.call("/v1/resume", {})
        self.worker.wait_for(self._is_awake, what="awake again", timeout_s=SETTLED_WITHIN_S)
        self._judge()
        for excuse in (Excuse.ASKED, Excuse.ENDED, Excuse.KILLED):
            self.times.end(excuse)
        self.put_all(NAMES)
        own, pid = len(self._before) - 1, self.worker.pid
        self.worker.wait_for(lambda: len(descendants(pid)) == own, what="left with its own processes only", timeout_s=10)
        if self.outcome.sequences % LEFT_OVER_EVERY == 0:
            self._wrong(*left_over(self.worker, self._before))

    def _is_awake(self) -> bool:
        """Also by a call, as one may have said another policy since the file did."""
        document = self.worker.state()
        state, running = document["state"], document["operation"] is not None
        if state == "draining" or (not running and (state == "asleep" or document["policy"] != "AlwaysAwake")):
            self.wake({"policy": "AlwaysAwake"})
        return bool(state == "ready" and not running and document["policy"] == "AlwaysAwake")

    def _judge(self) -> None:
        outcome, judge, asked_since = self.outcome, Judge(self, MAX_HELD), self.asking.answers(ANSWERED_WITHIN_S)
        outcome.asked += len(asked_since)
        for asked in asked_since:
            until = asked.ended or float("inf")
            asked.beside = sum(other.begun <= until and (other.ended or until) >= asked.begun for other in asked_since) - 1
            if why := judge.why_wrong(asked, self.times):
                self._wrong(why)
            elif asked.status == 200:
                outcome.images += 1
                outcome.while_cold += bool(asked.held)
                outcome.slowest_s = max(outcome.slowest_s, asked.ended - asked.begun)
            else:
                outcome.refused[asked.code if not asked.gone else "gone"] += 1
        outcome.worst_difference = self.worst_difference

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
        self._start()
        self.broken = False

    def _wrong(self, *found: str) -> None:
        self.outcome.wrong += [f"sequence {self.outcome.sequences} after {self.trace}: {what}" for what in found]
