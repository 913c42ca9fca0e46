# SPDX-License-Identifier: Apache-2.0
"""The edge's part of `make soak`: schemathesis on the OpenAPI documents of both ports, and rude clients, against a real worker.

Rounds with consecutive seeds run until there were as many requests as asked for. Findings of schemathesis are faults: a 5xx other than the
documented 503s, an undocumented answer, or a wrong request that is accepted. Other faults are a late answer, a traceback in the worker's
log, and leaked memory, descriptors, processes or requests.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.soak.frame import Outcome
from support.soak.traffic import LORAS
from support.worker.leftovers import footprint, left_at_end, left_over
from support.worker.process import REPOSITORY, WorkerProcess
from support.worker.rude_clients import be_rude

# Examples of each operation and round. With those that schemathesis derives from bounds a round is about 1,500 requests.
EXAMPLES = 60
ROUND_LIMIT_S = 1800
RUDE_CLIENTS = 100
# Small images of few steps: the test is of the edge, not of the ranks.
OPTIONS = ("--default-steps=2", "--max-steps=12", "--max-pixels=16384", "--default-size=32x32", "--max-images=3")
# The worker refuses more than its document can express: sizes of the model, limits, names, another boot, its sleep. There is one
# thread, because hypothesis uses Python 3.11's `ast.parse`, which sometimes fails in several threads.
CONFIG = """
color = false
continue-on-failure = true
hooks = "support.soak.edge_checks"
request-timeout = 120
workers = 1
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409", "502", "503", "504"]
negative_data_rejection.expected-statuses = ["400", "401", "404", "405", "409", "413", "503"]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]
"""
DRAIN = "/v1/drain"
# Generated sources of adapters lead here, where nothing listens; see also `edge_checks`.
NO_HUB = {"HF_ENDPOINT": "https://127.0.0.1:9"}


class EdgeSoak:
    """Rounds of generated requests on one worker; `folder` is for configuration and reports.

    Real: the worker, schemathesis, and the sockets of rude clients. Not real: the hub and stores of adapters, where nobody listens.
    """

    def __init__(self, worker: WorkerProcess, folder: Path, *, seed: int, examples: int = EXAMPLES, options: Sequence[str] = ()) -> None:
        self.outcome = Outcome(seed, counts="rounds data_requests control_requests rude_clients")
        self._worker, self._folder, self._examples, self._options = worker, folder, examples, options
        (folder / "schemathesis.toml").write_text(CONFIG)

    def run_round(self, *, rude: int = RUDE_CLIENTS) -> None:
        """Fuzz the data port, beside rude clients, and then the control port with schemathesis. Each round has a seed of its own, and
        ends with the worker awake."""
        outcome, worker = self.outcome, self._worker
        seed = outcome.seed + outcome.rounds
        outcome.rounds += 1
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(self._schemathesis, worker.url, seed, self._examples)
            asyncio.run(be_rude(int(worker.url.rpartition(":")[2]), seed=seed, count=rude))
        outcome.rude_clients += rude
        outcome.data_requests += asking.result()
        outcome.control_requests += self._control(seed, f"--exclude-path={DRAIN}")
        outcome.done = outcome.data_requests + outcome.control_requests
        # The control port's calls may have left the worker paused or asleep.
        worker.control("POST", "/v1/resume", json={"operationId": "resume"})
        worker.wait_for(lambda: worker.state()["state"] in ("ready", "asleep"), what="settled")
        if worker.state()["state"] == "asleep":
            worker.wake()

    def run_drain(self) -> None:
        """Fuzz the drain call. It must come last, since a drained worker accepts no other request."""
        self.outcome.control_requests += self._control(self.outcome.seed, f"--include-path={DRAIN}")

    def _control(self, seed: int, *options: str) -> int:
        token = f"--header=Authorization: Bearer {self._worker.token}"
        return self._schemathesis(self._worker.control_url, seed, self._examples // 4, token, *options)

    def _schemathesis(self, url: str, seed: int, examples: int, *options: str) -> int:
        """Run schemathesis on one port; record its findings as faults, and return the number of generated requests. It is 0 without a
        report."""
        path = self._folder / f"report-{seed}-{url.rpartition(':')[2]}.json"
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file=schemathesis.toml", "run", f"{url}/openapi.json"]
        command += [f"--seed={seed}", f"--max-examples={examples}", "--checks=all", "--no-shrink", f"--report-json-path={path}"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])}
        command += [*self._options, *options]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=self._folder, timeout=ROUND_LIMIT_S)
        if not path.exists():
            self.outcome.wrong.append(f"schemathesis ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return 0
        report = json.loads(path.read_text())
        if report["failures"] or report["errors"]:
            # The report has the figures; the output has the requests that reproduce a failure.
            found = done.stdout.partition("= FAILURES =")[2] or done.stdout.partition("= ERRORS =")[2]
            self.outcome.wrong.append("\n".join(line[:500] for line in found.splitlines()[:80]) or done.stdout[-4000:])
        if not report["complete"]:
            self.outcome.wrong.append(f"schemathesis stopped: {report['stop_reason']}")
        return int(report["test_cases"]["generated"])


def run_edge(folder: Path, count: int, *, seed: int, limit_s: float) -> Outcome:
    """Run `count` rounds, or as many as there is time for, against a new worker of two ranks, and then fuzz its drain call. The first
    round also warms it up; what is left over, and a traceback in the log, are faults."""
    with WorkerProcess(ranks=2, loras=LORAS, options=OPTIONS, env={"TMPDIR": str(folder), **NO_HUB}) as worker:
        worker.wait_ready()
        soak, before = EdgeSoak(worker, folder, seed=seed), {}
        for _ in soak.outcome.until(count, limit_s):
            soak.run_round()
            before = before or footprint(worker)
        soak.outcome.wrong += left_over(worker, before)
        soak.run_drain()
        soak.outcome.wrong += left_at_end(worker, folder)
        soak.outcome.wrong += [f"the worker's log: Traceback{after[:2000]}" for after in worker.output.split("Traceback")[1:2]]
    return soak.outcome
