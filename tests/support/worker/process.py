# SPDX-License-Identifier: Apache-2.0
"""A real `diffusion-worker serve` in a process of its own, for tests: started on free ports, waited for, read, ended.

Real: all of it, except the ranks and the model where the program is `FAKE_PROGRAM`. Every wait has a deadline and fails with the worker's
output. Leaving the block of a `WorkerProcess` ends the worker and its ranks.
"""

import base64
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
from openai import OpenAI
from PIL import Image

from tools.demo import weights_memory
from tools.demo.images import client_for
from tools.suite import canary

REPOSITORY = Path(__file__).resolve().parents[3]
DIGITS = REPOSITORY / "examples" / "digits"
DIGITS_MODEL = DIGITS / "model"
POD_UID = "pod-1"
# The same server over `FakeRankGroup`, which starts in half a second.
FAKE_PROGRAM = ("-m", "support.worker.fake_worker")
LISTENING = re.compile(r"listening data=\S+:(\d+) control=\S+:(\d+) boot_id=(\S+)")
# A start takes ten seconds on an idle machine, since torch is imported.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


# Paths of the data port whose answers must contain no text of a request.
SEARCHED = ("/metrics", "/v1/status")


class WorkerProcess(contextlib.ExitStack):
    """A worker's server and ranks in a subprocess, on loopback ports that the system chooses, until the block or `close` ends it. A
    `wrapper` is a command that must exec the rest."""

    def __init__(
        self,
        model: Path = DIGITS_MODEL,
        *,
        ranks: int = 1,
        loras: Mapping[str, Path] | None = None,
        served_name: str | None = "digits",
        options: tuple[str, ...] = (),
        token: str | None = "the-control-token",
        env: Mapping[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "diffusion_worker.cli"),
        wrapper: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="worker-process-")))
        self.token, self._token_path = token, self.folder / "token"
        self._output_path = self.folder / "output.txt"
        self.termination_log = self.folder / "termination-log"
        self.termination_log.touch()
        command = [*wrapper, sys.executable, *program, "serve", f"--model={model}", f"--ranks={ranks}"]
        command += [f"--served-name={served_name}"] if served_name is not None else []
        command += ["--host=127.0.0.1", "--port=0", "--control-port=0"]
        command += [f"--lora={name}={path}" for name, path in (loras or {}).items()]
        if token is not None:
            self.write_token(token)
            command.append(f"--control-token-file={self._token_path}")
        self.command = [*command, *options]
        own = {"PYTHONUNBUFFERED": "1", "DIFFUSION_TERMINATION_LOG": str(self.termination_log), "DIFFUSION_POD_UID": POD_UID}
        self._env = {**os.environ, **own, **(env or {})}
        paths = [str(REPOSITORY / "worker" / "src"), str(REPOSITORY / "tests"), self._env.get("PYTHONPATH")]
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # Set by `launch`.
        self._process: subprocess.Popen[bytes]
        self._http = self.enter_context(httpx2.Client(timeout=600))
        self.boot_id = self.url = self.control_url = ""

    def __enter__(self) -> "WorkerProcess":
        """Start the worker; a worker that misses its deadline is ended."""
        with contextlib.ExitStack() as stack:
            stack.push(self)
            self.start()
            stack.pop_all()
        return self

    def write_token(self, token: str) -> None:
        """Replace the worker's token file, as a rotation does. The attribute `token`, which calls from here send, stays as it is."""
        replacement = self.folder / "token.new"
        replacement.write_text(token + "\n")
        replacement.rename(self._token_path)

    def start(self) -> None:
        """Launch the process, wait up to ten minutes for its ports, and set `url`, `control_url` and `boot_id`. Raises AssertionError
        with its output if it ends or is late."""
        self.launch()
        found = self.wait_for(lambda: LISTENING.search(self.output), what="listening", timeout_s=600)
        self.url, self.control_url = (f"http://127.0.0.1:{port}" for port in found.group(1, 2))
        self.boot_id = found[3]

    def launch(self) -> None:
        """Start the process without waiting."""
        self.started_at = time.monotonic()
        with self._output_path.open("wb") as output:
            self._process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT, env=self._env, cwd=self.folder)
        self.callback(self._search)
        self.callback(self._end, self._process)

    @property
    def pid(self) -> int:
        """Return the pid of the server process."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Poll `/readyz` until its status is 200. AssertionError if `timeout_s` seconds pass or the worker ends before."""

        def is_ready() -> bool:
            with contextlib.suppress(httpx2.TransportError):  # the worker ended: `wait_for` reports how
                return self.get("/readyz").status_code == 200
            return False

        self.wait_for(is_ready, what="ready", timeout_s=timeout_s)

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until the worker ends, and return its exit code; AssertionError after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end within {timeout_s:g} s\n{self.output}") from None

    def wait_for(self, check: Callable[[], Any], *, what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Poll until `check` returns something true, and return it; fail at once when the worker ends."""
        return self.wait_until(check, what=what, timeout_s=timeout_s, lives=True)

    def wait_until(self, check: Callable[[], Any], *, what: str, timeout_s: float = START_TIMEOUT_S, lives: bool = False) -> Any:
        """Poll until `check` returns something true, and return it; the worker may end meanwhile unless `lives` is set."""
        deadline = time.monotonic() + timeout_s
        while not (result := check()):
            ended = self._process.poll()
            if (lives and ended is not None) or time.monotonic() > deadline:
                raise AssertionError(f"the worker was not {what} within {timeout_s:g} s, its exit code is {ended}\n{self.output}")
            time.sleep(0.02)
        return result

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask the server to drain, and wait for it to end by itself. Returns its status; AssertionError if it still runs after
        `timeout_s`."""
        self.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the server, whose ranks end with it, and SIGKILL if it is still there after STOP_TIMEOUT_S seconds."""
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def _search(self) -> None:
        """Search the output and the termination log of the worker, which has ended, for prompts. A prompt that is found fails the test."""
        canary.search(self.output, "the worker's output")
        if self.termination_log.exists():
            canary.search(self.termination_log.read_text(errors="replace"), "the worker's last words")

    @property
    def output(self) -> str:
        """Return the output of the worker and its ranks so far."""
        return self._output_path.read_text(errors="replace")

    def openai(self) -> OpenAI:
        return client_for(self.url)

    def get(self, path: str) -> httpx2.Response:
        answer = self._http.get(self.url + path)
        if path in SEARCHED:
            canary.search(answer.text, path)
        return answer

    def request_images(self, **body: Any) -> httpx2.Response:
        """Send an image request, and return the answer with any status."""
        return self._http.post(f"{self.url}/v1/images/generations", json=body)

    def image(self, **body: Any) -> Image.Image:
        """Ask for an image and decode the first of the answer. Any status but 200 raises AssertionError with its body."""
        answer = self.request_images(**body)
        assert answer.status_code == 200, answer.text
        return decode_image(answer.json()["data"][0]["b64_json"])

    def control(self, method: str, path: str, *, token: str | None = None, **options: Any) -> httpx2.Response:
        """Send a request to the control port. The worker's bearer token is attached unless `token` overrides it; an empty `token` sends
        none."""
        used = token if token is not None else self.token
        headers = {"Authorization": f"Bearer {used}"} if used else {}
        return self._http.request(method, self.control_url + path, headers=headers, **options)

    def state(self) -> dict[str, Any]:
        """Return the state document of the control port, and check that it has no prompt."""
        answer = self.control("GET", "/v1/state")
        assert answer.status_code == 200, answer.text
        canary.search(answer.text, "/v1/state")
        return dict(answer.json())

    def wait_state(self, state: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the worker has this state, and return the state document."""
        self.wait_for(lambda: self.state()["state"] == state, what=state, timeout_s=timeout_s)
        return self.state()

    def sleep(self, timeout_s: float = 60.0, **body: Any) -> dict[str, Any]:
        """Put the worker to sleep, wait until it sleeps, and return the state document."""
        return self._operate("/v1/sleep", "asleep", timeout_s, body)

    def wake(self, timeout_s: float = 60.0, **body: Any) -> dict[str, Any]:
        """Request a wake, wait for the state ready, and return the state document. Fields of the call are in `body`; any refusal fails
        the test."""
        return self._operate("/v1/wake", "ready", timeout_s, body)

    def _operate(self, path: str, goal: str, timeout_s: float, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.control("POST", path, json=self._call(body))
        assert answer.status_code in (200, 202), answer.text
        return self.wait_state(goal, timeout_s)

    def put_adapter(self, name: str, path: Path, **body: Any) -> httpx2.Response:
        return self.control("PUT", f"/v1/adapters/{name}", json=self._call({"source": {"path": str(path)}, **body}))

    def delete_adapter(self, name: str, **query: Any) -> httpx2.Response:
        return self.control("DELETE", f"/v1/adapters/{name}", params=self._call({"drainSeconds": 10, **query}))

    def _call(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"operationId": uuid.uuid4().hex, "bootId": self.boot_id, **fields}

    def rank_pids(self) -> list[int]:
        """Return the process id of every rank, ordered by rank; None for one that does not run."""
        return [rank["pid"] for rank in self.state()["ranks"]]


def decode_image(b64_json: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    image.load()
    return image


def process_exists(pid: int) -> bool:
    """Return whether a process lives; a zombie counts as dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def descendants(pid: int) -> list[int]:
    """Return the pids of the process's children, their children and so on, without its own."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def resident_bytes(pid: int, mappings: list[str]) -> int:
    """Return the resident bytes of the mappings in a process's smaps that overlap these address ranges (`start-end` in hex)."""
    return weights_memory.resident_bytes(Path(f"/proc/{pid}/smaps").read_text(), [weights_memory.parse_range(text) for text in mappings])
