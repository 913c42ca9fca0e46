# SPDX-License-Identifier: Apache-2.0
"""The first look of the README: its options start a worker, and its request gets an image.

Not real: the fresh environment and the port, which the test replaces by its own.
"""

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from support.worker.process import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "README.md").read_text().partition("\n## A first look")[2].partition("\n## ")[0]
START, REQUEST = (block.replace("\\\n", " ") for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL))


def arguments() -> tuple[str, dict[str, str]]:
    """Return the model and the options that the README gives to `diffusion-worker serve`."""
    words = shlex.split(START.splitlines()[1])
    assert words[:2] == ["/tmp/look/bin/diffusion-worker", "serve"]
    return words[2], dict(zip(words[3::2], words[4::2], strict=True))


def test_the_environment_is_installed_with_all_that_a_rank_imports() -> None:
    first = START.splitlines()[0]
    assert shlex.split(first)[-4:] == ["install", "-c", "constraints.txt", "./worker"]
    assert (ROOT / "constraints.txt").exists()


@pytest.mark.slow
def test_the_request_of_the_readme_gets_an_image_from_its_worker() -> None:
    model, given = arguments()
    name, _, adapter = given.pop("--lora").partition("=")
    served_name = given.pop("--served-name")
    assert given == {"--host": "127.0.0.1"}
    words = shlex.split(REQUEST)
    path, body = words[2].removeprefix("http://127.0.0.1:8000"), json.loads(words[words.index("-d") + 1])
    with WorkerProcess(ROOT / model, loras={name: ROOT / adapter}, served_name=served_name) as worker:
        worker.wait_ready()
        worker.wait_for(lambda: "started state=ready" in worker.output, what="through with its start")
        assert worker.get("/").status_code == 200
        assert path == "/v1/images/generations"
        answer = worker.request_images(**body)
    assert answer.status_code == 200, answer.text
    assert Image.open(io.BytesIO(answer.content)).size == (64, 64)
