# SPDX-License-Identifier: Apache-2.0
"""Requests that kill real ranks: ten different ones within a minute fail by themselves, and everybody beside them gets an image."""

import concurrent.futures
from typing import Any

import httpx2
import pytest

from support.soak.frame import difference, pixels
from support.worker.process import WorkerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POISONS, BESIDE_EACH = 4, 3
# All restarts together take a minute on an idle machine.
LONGEST_S = 800


def test_four_poisons_at_once_fail_alone_and_three_innocents_beside_each_get_their_images() -> None:
    options = ("--worker-extension=support.worker.extensions:Poisoned", "--warmup-steps=0")
    with WorkerProcess(options=options) as worker, httpx2.Client(timeout=LONGEST_S, limits=httpx2.Limits(max_connections=100)) as client:
        worker.wait_ready()

        def ask(prompt: str, seed: int) -> httpx2.Response:
            body = {"prompt": prompt, "seed": seed, "num_inference_steps": 4, "size": "32x32"}
            return client.post(f"{worker.url}/v1/images/generations", json=body)

        def image(answer: httpx2.Response) -> Any:
            assert answer.status_code == 200, answer.text
            return pixels(answer.json())

        alone = [image(ask("a red digit seven", seed)) for seed in range(BESIDE_EACH)]
        boot = worker.boot_id
        with concurrent.futures.ThreadPoolExecutor(POISONS * (BESIDE_EACH + 1)) as threads:
            poisons, innocents = [], []
            for number in range(POISONS):
                poisons.append(threads.submit(ask, f"poison kumquatfen {number}", number))
                innocents += [threads.submit(ask, "a red digit seven", seed) for seed in range(BESIDE_EACH)]
            worker.wait_for(lambda: worker.state()["queued"] + worker.state()["inFlight"] > POISONS, what="asked", timeout_s=60)
            failed = [future.result() for future in poisons]
            made = [image(future.result()) for future in innocents]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in failed] == [(422, "RequestFailed")] * POISONS
        # An image that shared a step with others may be rounded otherwise.
        assert [number for number, one in enumerate(made) if difference(one, alone[number % BESIDE_EACH]) > 1] == []
        # The last loss may have been the last poison's.
        state = worker.wait_state("ready")
        assert (state["bootId"], state["failure"]) == (boot, None)
        assert state["restarts"] <= 2 * POISONS
        # The same request is refused without a loss, whatever the seed.
        again = ask("poison kumquatfen 0", 99)
        assert (again.status_code, again.headers["x-should-retry"]) == (422, "false")
        assert "requests like this one are refused for" in again.json()["error"]["message"]
        assert worker.state()["restarts"] == state["restarts"]
