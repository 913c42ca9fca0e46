# SPDX-License-Identifier: Apache-2.0
"""Privacy of prompts: no log, metric, state document, status or Event contains one, however its request ends.

Real ranks behind a real server, and the operator's real reconciles over it.
"""

import json
import os
import signal
import threading
from typing import Any

import httpx2
import pytest

from diffusion_operator.api.names import KINDS
from support.operator.reconcile_story import REAL_PROGRAM, Story, story
from support.worker.process import WorkerProcess
from support.worker.wordy_encoders import words

pytestmark = pytest.mark.slow
SECRET = "velvet-armadillo"
# Longer than any text encoder reads: diffusers quotes the words that it cut off in a warning.
LONG = words(300)
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
REFUSED: list[dict[str, Any]] = [
    {"prompt": SECRET, "size": "huge"},
    {"prompt": SECRET, "model": "nobody"},
    {"prompt": SECRET, "num_inference_steps": -1},
    {"prompt": SECRET, "no_such_field": SECRET},
    {"prompt": [SECRET]},
    {"prompt": {"text": SECRET}},
    {"prompt": f"{SECRET} " * 1000},
    {"prompt": "a digit", "negative_prompt": [SECRET]},
    {SECRET: "a digit"},
]


def ask_for_much(worker: WorkerProcess) -> None:
    """Send requests that are refused, and others that are served."""
    worker.image(prompt=f"a red digit seven, {SECRET}", negative_prompt=SECRET, seed=1)
    worker.image(prompt=" ".join(LONG), num_inference_steps=2, seed=1)
    for body in REFUSED:
        assert worker.request_images(**body).is_client_error, body
    headers = {"Content-Type": "application/json"}
    for raw in (f'{{"prompt": "{SECRET}"', f'"{SECRET}"', f'{{"prompt": "{SECRET}\\ud800"}}'):
        assert httpx2.post(worker.url + GENERATIONS, content=raw, headers=headers).is_client_error, raw
    image = {"image": (f"{SECRET}.png", b"no image", "image/png")}
    assert httpx2.post(worker.url + EDITS, data={"prompt": SECRET}, files=image).is_client_error


def lose_a_rank(worker: WorkerProcess) -> None:
    """Kill a rank while a request runs, and check that the request is made again and answered."""
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(worker.request_images(prompt=f"a digit, {SECRET}", num_inference_steps=60, seed=2).status_code)
    )
    asking.start()
    worker.wait_for(lambda: worker.state()["inFlight"], what="a request that runs")
    os.kill(worker.rank_pids()[0], signal.SIGKILL)
    asking.join(120)
    assert answers == [200]


def told(one: Story) -> dict[str, str]:
    """Return every text in which a prompt could appear, by its place."""
    cluster, worker = one.rig.cluster, one.worker
    objects = [cluster.find(kind, name) for kind in KINDS.values() for name in cluster.names(kind)]
    return {
        "log of the worker": worker.output,
        "its last words": worker.termination_log.read_text(),
        "its metrics": worker.get("/metrics").text,
        "its state": json.dumps(worker.state()),
        "objects, with Events": json.dumps(objects, default=str),
    }


async def test_no_prompt_is_told_however_its_request_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with story(program=REAL_PROGRAM) as one:
        await one.until_deployment("Ready", "True", "Serving")
        ask_for_much(one.worker)
        await one.step()
        lose_a_rank(one.worker)
        await one.wait(lambda: "RankLost" in one.rig.cluster.events(), one.rig.status)
        for where, text in told(one).items():
            assert [word for word in (SECRET, *LONG) if word in text.casefold()] == [], where
        assert SECRET not in caplog.text, "the operator's log"
        assert one.worker.output.count("image request request_id=") > len(REFUSED), "they are logged, and so could be what they say"
