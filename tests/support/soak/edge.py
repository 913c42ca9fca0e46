# SPDX-License-Identifier: Apache-2.0
"""The edge's part of `make soak`: schemathesis on the OpenAPI documents of both ports, and rude clients, against a real worker.

Rounds with seeds that follow each other, until there were as many requests as asked for. Wrong is what schemathesis finds (a 5xx
but the documented 503s, an answer that its document does not have, a wrong request that is accepted), an answer that does
not come in time, a traceback in the worker's log, and memory, descriptors, processes or requests that are left.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.worker.leftovers import footprint, left_at_end, left_over
from support.worker.process import DIGITS, WorkerProcess
from support.worker.rude_clients import be_rude

TESTS = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 120
# Of each operation and round; with what schemathesis makes of the document's own bounds a round is about 1,500 requests.
EXAMPLES = 60
ROUND_LIMIT_S = 1800
RUDE_CLIENTS = 100
# Small images of few steps: what is asked is the edge, not the ranks.
OPTIONS = ("--default-steps=2", "--max-steps=12", "--max-pixels=16384", "--default-size=32x32", "--max-images=3")
# What a document cannot say is refused by the worker: sizes of the model, limits, names, another boot, its sleep.
CONFIG = """
hooks = "support.soak.edge_checks"
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409", "502", "503", "504"]
negative_data_rejection.expected-statuses = ["400", "401", "404", "405", "409", "413", "503"]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]
"""
# Sources of adapters that are generated are looked for here, where nobody listens; see also `edge_checks`.
NO_HUB = {"HF_ENDPOINT": "https://127.0.0.1:9"}


@dataclass
class EdgeOutcome:
    """What it came to."""

    seed: int
    rounds: int = 0
    requests: int = 0
    data_requests: int = 0
    control_requests: int = 0
    rude_clients: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1)})


class EdgeSoak:
    """Rounds of generated requests on one worker; `folder` is for configuration and reports."""

    def __init__(self, worker: WorkerProcess, folder: Path, *, seed: int, examples: int = EXAMPLES, phases: str | None = None) -> None:
        self.outcome = EdgeOutcome(seed)
        self._worker = worker
        self._folder = folder
        self._examples = examples
        self._phases = phases
        self._config = folder / "schemathesis.toml"
        self._config.write_text(CONFIG)

    async def run_round(self, *, rude: int = RUDE_CLIENTS) -> None:
        """Both ports once, with the next seed."""
        outcome = self.outcome
        seed = outcome.seed + outcome.rounds
        outcome.rounds += 1
        port = int(self._worker.url.rpartition(":")[2])
        asking = asyncio.create_task(self._schemathesis(self._worker.url, seed, self._examples))
        await be_rude(port, seed=seed, count=rude)
        outcome.rude_clients += rude
        outcome.data_requests += await asking
        token = f"--header=Authorization: Bearer {self._worker.token}"
        outcome.control_requests += await self._schemathesis(self._worker.control_url, seed, self._examples // 4, token)
        outcome.requests = outcome.data_requests + outcome.control_requests
        self._wake()

    async def _schemathesis(self, url: str, seed: int, examples: int, *options: str) -> int:
        """Let it ask one port; takes down what it found and returns how many requests there were."""
        report = self._folder / f"report-{seed}-{url.rpartition(':')[2]}.json"
        command = ["-m", "schemathesis.cli", f"--config-file={self._config}", "run", f"{url}/openapi.json"]
        command += [f"--seed={seed}", f"--max-examples={examples}", "--checks=all", "--continue-on-failure", "--no-shrink"]
        # One thread: Python 3.11's `ast.parse`, by which hypothesis describes what it draws, fails at times in several.
        command += [f"--request-timeout={ANSWER_TIMEOUT_S}", "--workers=1", "--report=json", f"--report-json-path={report}", *options]
        command += [f"--phases={self._phases}"] if self._phases else []
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]), "NO_COLOR": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env, cwd=self._folder
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), ROUND_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if not report.exists():
            self.outcome.wrong.append(f"schemathesis ended with {process.returncode}: {output.decode()[-2000:]}")
            return 0
        return self._judge(json.loads(report.read_text()), output.decode())

    def _judge(self, report: dict[str, Any], output: str) -> int:
        """Its report has the figures, what it prints has the requests that make a failure come again."""
        if report["failures"] or report["errors"]:
            found = output.partition("= FAILURES =")[2] or output.partition("= ERRORS =")[2]
            self.outcome.wrong.append("\n".join(line[:500] for line in found.splitlines()[:80]) or output[-4000:])
        if not report["complete"]:
            self.outcome.wrong.append(f"schemathesis stopped: {report['stop_reason']}")
        count: int = report["test_cases"]["generated"]
        return count

    def _wake(self) -> None:
        """The control port's calls may have left it paused or asleep."""
        worker = self._worker
        worker.control("POST", "/v1/resume", json={"operationId": "resume"})
        worker.wait_for(lambda: worker.state()["state"] in ("ready", "asleep"), what="settled")
        if worker.state()["state"] == "asleep":
            worker.wake()


async def run_edge(folder: Path, *, seed: int, requests: int, limit_s: float) -> EdgeOutcome:
    """Rounds against a real worker of two ranks; the first one warms it up and counts."""
    started = time.monotonic()
    loras = {name: DIGITS / "loras" / name for name in ("stripes", "frame")}
    with WorkerProcess(ranks=2, loras=loras, options=OPTIONS, env={"TMPDIR": str(folder), **NO_HUB}) as worker:
        worker.wait_ready()
        soak = EdgeSoak(worker, folder, seed=seed)
        outcome = soak.outcome
        await soak.run_round()
        before = footprint(worker)
        while outcome.requests < requests and time.monotonic() - started < limit_s:
            await soak.run_round()
        outcome.wrong += left_over(worker, before)
        if "Traceback" in worker.output:
            outcome.wrong.append("the worker's log: " + worker.output[worker.output.index("Traceback") :][:2000])
        outcome.wrong += left_at_end(worker, folder)
    outcome.seconds = time.monotonic() - started
    return outcome
