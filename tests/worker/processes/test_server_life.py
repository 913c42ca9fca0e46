# SPDX-License-Identifier: Apache-2.0
"""The server process from start to exit code, over fake ranks: ports, signals, deadlines, the termination log."""

import concurrent.futures
import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess

pytestmark = pytest.mark.slow


def fake(behaviour: Mapping[str, Any] | None = None, **options: Any) -> WorkerProcess:
    """Return a server over fake ranks with this behaviour; it is not started yet."""
    env = {"FAKE_WORKER": json.dumps(behaviour or {})}
    return WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, env=env, **options)


def images_or_nothing(worker: WorkerProcess) -> httpx2.Response | None:
    """Ask for an image; return the answer, or None if the connection broke."""
    try:
        return worker.request_images(prompt="p kumquatfen", num_inference_steps=200)
    except httpx2.TransportError:
        return None


def test_both_ports_answer_while_the_ranks_load() -> None:
    with fake({"loadSeconds": 60}) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert worker.get("/healthz").json() == {"status": "ok"}
        assert worker.get("/readyz").status_code == 503
        assert worker.state()["state"] == "starting"
        held = threads.submit(worker.request_images, prompt="p kumquatfen")
        worker.wait_for(lambda: worker.state()["held"]["current"] == 1, what="holding the request")
        worker.send_signal(signal.SIGTERM)
        assert (held.result(60).status_code, held.result().json()["error"]["code"]) == (503, "Terminating")
        assert held.result().headers["retry-after"]
        assert worker.wait_exit() == 0


def test_a_terminated_worker_finishes_its_request_and_exits_with_0() -> None:
    with fake({"stepSeconds": 0.2}) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        running = threads.submit(worker.request_images, prompt="p kumquatfen", num_inference_steps=5)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.send_signal(signal.SIGTERM)
        worker.wait_for(lambda: worker.get("/readyz").status_code == 503, what="draining")
        refused = worker.request_images(prompt="q kumquatfen")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "Terminating")
        assert running.result(30).status_code == 200
        assert worker.wait_exit() == 0
        assert worker.termination_log.read_text() == ""


def test_a_request_that_outlasts_the_drain_is_ended_with_a_code() -> None:
    with (
        fake({"stepSeconds": 0.5}, options=("--drain-timeout-seconds=0.5",)) as worker,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        worker.wait_ready()
        running = threads.submit(worker.request_images, prompt="p kumquatfen", num_inference_steps=200)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        assert worker.terminate() == 0
        assert (running.result(60).status_code, running.result().json()["error"]["code"]) == (503, "Terminating")


def test_a_group_lost_while_loading_ends_the_worker_too() -> None:
    with fake({"dieAfterSeconds": 0.3}, options=("--startup-timeout-seconds=60",)) as worker:
        assert worker.wait_exit() == 70


def test_a_model_that_cannot_be_loaded_ends_the_worker_with_1_and_the_reason(tmp_path: Path) -> None:
    """Cut the file of a model's weights. Only real ranks find it; `runner/loading` has the other faults of a model."""
    model = shutil.copytree(DIGITS_MODEL, tmp_path / "cut")
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    with WorkerProcess(model) as worker:
        assert worker.wait_exit(600) == 1
        reason = worker.termination_log.read_text()
        assert str(model) in reason and "transformer" in reason, reason


def test_the_termination_log_is_never_made() -> None:
    with fake({"configError": "no"}) as worker:
        worker.termination_log.unlink(missing_ok=True)
        worker.wait_exit()
        # A log that is deleted, before or after it was written, is not created again.
        assert not worker.termination_log.exists() or worker.termination_log.read_text() == "no"


@pytest.mark.slow
def test_a_shutdown_that_hangs_is_ended_by_the_watchdog() -> None:
    with fake({"hangAtStop": True}, options=("--drain-timeout-seconds=0.1",)) as worker:
        worker.wait_ready()
        started = time.monotonic()
        assert worker.terminate(timeout_s=60) == 70
        assert time.monotonic() - started > 10
        assert "the shutdown took more than" in worker.termination_log.read_text()


def test_a_second_signal_ends_the_worker_at_once() -> None:
    with fake({"stepSeconds": 1.0}) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        running = threads.submit(images_or_nothing, worker)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.send_signal(signal.SIGINT)
        worker.wait_for(lambda: "SIGINT: draining" in worker.output, what="draining")
        worker.send_signal(signal.SIGINT)
        assert worker.wait_exit() == 128 + signal.SIGINT
        assert running.result(60) is None


def test_a_client_that_does_not_read_holds_no_shutdown_up() -> None:
    with fake() as worker:
        worker.wait_ready()
        host, port = worker.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half_open:
            half_open.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert worker.terminate(timeout_s=60) == 0


def test_without_a_token_the_control_port_is_on_loopback_only_and_open() -> None:
    with fake(token=None, options=("--host=0.0.0.0",)) as worker:
        found = re.search(r"listening data=(\S+):\d+ control=(\S+):\d+", worker.output)
        assert found is not None and found.groups() == ("0.0.0.0", "127.0.0.1")
        assert worker.state()["bootId"] == worker.boot_id


def test_with_a_token_the_control_port_is_where_the_data_port_is() -> None:
    with fake(options=("--host=0.0.0.0",)) as worker:
        found = re.search(r"listening data=(\S+):\d+ control=(\S+):\d+", worker.output)
        assert found is not None and found.groups() == ("0.0.0.0", "0.0.0.0")


def test_a_port_in_use_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--control-port"):
            worker = fake(options=(f"{option}={port}",))
            worker.launch()
            assert worker.wait_exit() == 1
            assert f"Error: {option} {port} on 127.0.0.1" in worker.output
            worker.close()


def test_a_token_file_that_is_missing_is_named_with_its_option() -> None:
    worker = fake(token=None, options=("--control-token-file=/nowhere/token",))
    worker.launch()
    assert worker.wait_exit() == 1
    assert "Error: --control-token-file '/nowhere/token'" in worker.output
    worker.close()
