# SPDX-License-Identifier: Apache-2.0
"""The library with the real digits model: the examples of its page as a script, and a script that is interrupted."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from PIL import Image

from diffusion_worker import DiffusionEngine, ErrorCode, GeneratedImage, LoRARequest, RequestError
from support.worker.process import DIGITS, DIGITS_MODEL, REPOSITORY, WorkerProcess, decode_image, descendants

# Every engine loads the model in processes of its own.
pytestmark = pytest.mark.slow

TIMEOUT_S = 200.0
LORAS = DIGITS / "loras"
EXAMPLES = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The script is read from standard input and runs in an event loop, as in a notebook. Nothing closes its engine.
INTERRUPTED = """
import asyncio, signal, sys
from diffusion_worker import DiffusionEngine

# Whoever runs the tests in the background of a shell has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    engine = DiffusionEngine("examples/digits/model", limits={"max_steps": 10000})
    print(len(engine.generate("a red digit seven", steps=2)), flush=True)
    engine.generate("a red digit seven", n=8, steps=10000)

# asyncio.run would keep Ctrl-C to itself, once.
asyncio.new_event_loop().run_until_complete(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a folder to run scripts in, with the repository's examples."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


@contextmanager
def script_from_standard_input(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a script that Python reads from standard input, in the folder, and yield its process; its errors go to a file there.

    The whole process group is killed at the end of the block.
    """
    with (folder / "errors").open("w") as errors:
        script = subprocess.Popen(
            [sys.executable, "-"],
            cwd=folder,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    with script:
        try:
            assert script.stdin is not None
            script.stdin.write(text)
            script.stdin.close()
            yield script
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def edited(worker: WorkerProcess, path: Path, *, prompt: str, **fields: float) -> Image.Image:
    """Have a server edit the image in a file, by the OpenAI SDK, and return the result."""
    with path.open("rb") as image:
        answer = worker.openai().images.edit(image=image, prompt=prompt, extra_body=fields)
    assert answer.data is not None
    return decode_image(str(answer.data[0].b64_json))


def test_the_examples_of_the_page_run_as_a_script_without_a_guard(folder: Path, worker: WorkerProcess) -> None:
    examples = EXAMPLES.findall((REPOSITORY / "docs" / "library.md").read_text())
    assert len(examples) == 2 and "__name__" not in "".join(examples)
    (folder / "script.py").write_text("print('once')\n" + "".join(examples))
    ran = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    first, striped, config, *refused = ran.stdout.splitlines()
    assert (first, striped) == ("once", "['stripes x 0.8', 'frame x 1.0'] (64, 64) 4")
    assert config == "--lora stripes=examples/digits/loras/nothing: expected an adapter's folder or *.safetensors file, found nothing there"
    assert refused == [
        "InvalidRequest size: expected width and height that are multiples of 8, found 60x60",
        "InvalidRequest num_inference_steps: expected 1 to 50, found 100",
        "model_not_found model 'stripes' is not known to this worker: expected 'model' or one of its adapters: none",
    ]
    assert sorted(path.name for path in folder.glob("*.*g")) == [
        "blue.png",
        "four-5.jpg",
        "four-6.jpg",
        "seven.png",
        "two-5.jpg",
        "two-6.jpg",
    ]
    with Image.open(folder / "seven.png") as seven:
        assert seven.tobytes() == worker.image(prompt="a red digit seven", seed=1).tobytes()
        expected = edited(worker, folder / "seven.png", prompt="a blue digit seven", seed=1, strength=0.6)
        with Image.open(folder / "blue.png") as blue:
            assert blue.tobytes() == expected.tobytes() != seven.tobytes()
        assert json.loads(seven.info["provenance"])["seed"] == 1
    assert ran.stderr == ""


def test_adapters_of_calls_make_the_images_that_a_server_makes_with_them(tmp_path: Path, worker: WorkerProcess) -> None:
    request = {"seed": 3, "steps": 4, "guidance_scale": 3.0}
    asked = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}
    own = tmp_path / "own"
    shutil.copytree(LORAS / "stripes", own)
    with DiffusionEngine(DIGITS_MODEL, loras={"stripes": LORAS / "stripes"}, max_batch_size=1) as engine:

        def made(*loras: str | LoRARequest, scale: float | list[float] | None = None) -> GeneratedImage:
            (image,) = engine.generate("a red digit seven", lora_request=list(loras), lora_scale=scale, **request)
            return image

        stripes, frame = LoRARequest("stripes", 1, str(LORAS / "stripes")), LoRARequest("frame", 2, str(LORAS / "frame"))
        assert made(stripes).image.tobytes() == made("stripes").image.tobytes() == worker.image(**asked, model="stripes").tobytes()
        assert made(stripes, scale=0.5).image.tobytes() == worker.image(**asked, model="stripes", lora_scale=0.5).tobytes()
        both = [{"name": "stripes", "scale": 0.5}, {"name": "frame"}]
        assert made("stripes", frame, scale=[0.5, 1.0]).image.tobytes() == worker.image(**asked, lora=both).tobytes()
        # Other bytes under the same name and path are another adapter.
        before = made(LoRARequest("own", 3, str(own)))
        shutil.copytree(LORAS / "frame", own, dirs_exist_ok=True)
        after = made(LoRARequest("own", 3, str(own)))
        assert before.image.tobytes() == worker.image(**asked, model="stripes").tobytes()
        assert after.image.tobytes() == worker.image(**asked, model="frame").tobytes()
        framed = made("frame").provenance.adapters[0]
        assert after.metadata["adapters"] == [{"name": "own", "digest": framed.digest, "scale": 1.0, "identity": framed.identity}]
        assert made().image.tobytes() == worker.image(**asked).tobytes()
        with pytest.raises(RequestError) as raised:
            made(LoRARequest("nothing", 4, str(tmp_path / "nothing")))
        assert raised.value.code is ErrorCode.SOURCE_NOT_FOUND


def test_ctrl_c_in_a_script_from_standard_input_ends_it_and_its_ranks(folder: Path) -> None:
    with script_from_standard_input(INTERRUPTED, folder) as script:
        assert script.stdout is not None and script.stdout.readline() == "1\n", (folder / "errors").read_text()
        ranks = descendants(script.pid)
        assert len(ranks) >= 2
        ends = [os.pidfd_open(pid) for pid in ranks]
        # A terminal signals all processes of the script at once.
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(30) in (-signal.SIGINT, 128 + signal.SIGINT)
        # On a busy machine the line that a rank was killed follows.
        assert "KeyboardInterrupt" in (folder / "errors").read_text().splitlines()
        # The fork server follows its parent.
        assert [end for end in ends if not select.select([end], [], [], 10)[0]] == []
        for end in ends:
            os.close(end)
