# SPDX-License-Identifier: Apache-2.0
"""A real worker with a user's own pipeline class, from its command line to images and refusals."""

from pathlib import Path

import numpy as np
import pytest

from support.worker.process import WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

MINE = """
from diffusers import StableDiffusion3Pipeline

class Mine(StableDiffusion3Pipeline):
    def __call__(self, prompt, **kwargs):
        if "secret" in prompt:
            raise ValueError("prompt: expected no secrets")
        return super().__call__(prompt.replace("red", "blue"), **kwargs)
"""

ASKED = {"seed": 1, "size": "32x32", "num_inference_steps": 3}


def test_a_custom_pipeline_of_the_command_line_serves_on_every_rank_and_refuses_by_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "my_pipelines.py").write_text(MINE)
    options = ("--load-format=custom-pipeline", "--pipeline=my_pipelines:Mine")
    with WorkerProcess(ranks=2, options=options, env={"PYTHONPATH": str(tmp_path)}) as worker:
        worker.wait_ready()
        swapped, asked = (np.asarray(worker.image(prompt=f"a {colour} digit two", **ASKED)) for colour in ("red", "blue"))
        np.testing.assert_array_equal(swapped, asked)
        refused = worker.request_images(prompt="a secret digit kumquatfen", **ASKED)
        assert refused.status_code == 400
        assert "expected no secrets" in refused.text


def test_a_custom_pipeline_that_cannot_be_imported_ends_the_worker_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "my_pipelines.py").write_text("import no_such_module_anywhere\n")
    options = ("--load-format=custom-pipeline", "--pipeline=my_pipelines:Mine")
    with WorkerProcess(options=options, env={"PYTHONPATH": str(tmp_path)}) as worker:
        assert worker.wait_exit(timeout_s=60) == 1
        said = [line for line in worker.output.splitlines() if "--pipeline 'my_pipelines:Mine'" in line]
        assert said and "No module named 'no_such_module_anywhere'" in said[-1]
