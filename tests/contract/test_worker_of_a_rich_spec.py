# SPDX-License-Identifier: Apache-2.0
"""A real worker with the arguments of a pod whose spec has nearly every field: it starts with them, and serves accordingly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import (
    API_KEY_DIR,
    CACHE_DIR,
    CLAIMS_DIR,
    CONTROL_DIR,
    DESIRED_DIR,
    DESIRED_KEY,
    SECRETS_DIR,
    STATE_DIR,
    TOKEN_KEY,
)
from diffusion_operator.plan.adapters.mounted_file import packed
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.worker_arguments import worker_arguments
from support.worker.process import DIGITS_MODEL, WorkerProcess

pytestmark = pytest.mark.slow

KEY = "sk-of-the-secret"
SPEC: dict[str, Any] = {
    "servedName": "images",
    "model": {"source": {"path": str(DIGITS_MODEL)}, "pipeline": "StableDiffusion3Pipeline", "dtype": "Float32"},
    "engine": {"maxBatchSize": 4, "batchWindowMilliseconds": 5, "exact": True, "promptCacheSize": 4, "vaeTiling": True},
    "parallelism": {"ranksPerReplica": 2, "sequence": 2},
    "lora": {"maxLoaded": 2, "maxRank": 16, "onMissing": "Load", "targetModules": ["to_q", "to_k", "to_v", "to_out.0"]},
    "startup": {"timeoutSeconds": 900, "warmup": {"steps": 2, "sizes": ["64x64"]}},
    "service": {"apiKeySecret": {"name": "keys", "key": "images"}},
    "requests": {
        "defaults": {"steps": 3, "guidanceScale": "2.5", "size": "64x64"},
        "limits": {"maxSteps": 5, "maxPixels": 4096, "maxImages": 2},
    },
}
# Folders of a pod; a test puts them elsewhere.
FOLDERS = (API_KEY_DIR, CACHE_DIR, CLAIMS_DIR, CONTROL_DIR, DESIRED_DIR, SECRETS_DIR, STATE_DIR)
PORTS = ("--host=", "--port=", "--control-port=")


def in_a_folder(arguments: list[str], folder: Path) -> list[str]:
    """Make a pod's folders below `folder`, and rewrite its arguments to them.

    Host and ports are dropped, since the test's worker gets others.
    """
    for name in FOLDERS:
        (folder / name.lstrip("/")).mkdir(parents=True)
        arguments = [one.replace(f"={name}", f"={folder}{name}") for one in arguments]
    return [one for one in arguments if not one.startswith(PORTS)]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("pod")
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    deployment = msgspec.convert({"metadata": metadata, "spec": SPEC}, DiffusionDeployment)
    command, *options = in_a_folder(worker_arguments(deployment), folder)
    assert command == "serve"
    (folder / API_KEY_DIR.lstrip("/") / "images").write_text(KEY)
    (folder / CONTROL_DIR.lstrip("/") / TOKEN_KEY).write_text("the-control-token")
    (folder / DESIRED_DIR.lstrip("/") / DESIRED_KEY).write_text(desired_config(deployment, packed(()))["data"][DESIRED_KEY])
    with WorkerProcess(options=tuple(options), served_name=None) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def client(worker: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_a_request_without_the_key_of_the_secret_is_refused(worker: WorkerProcess) -> None:
    assert worker.request_images(prompt="a red digit seven").status_code == 401


def test_a_request_that_says_nothing_gets_the_defaults_of_the_spec(client: openai.OpenAI) -> None:
    answer = client.images.generate(model="images", prompt="a red digit seven")
    (image,) = answer.data or []
    made = image.model_extra["provenance"]
    assert (made["steps"], made["guidance_scale"], made["width"], made["height"]) == (3, 2.5, 64, 64)
    assert (made["model"], made["pipeline"], made["exact"]) == ("images", "StableDiffusion3Pipeline", True)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"extra_body": {"num_inference_steps": 6}}, "1 to 5"), ({"size": "128x64"}, "4096"), ({"n": 3}, "1 to 2")],
    ids=["steps", "pixels", "images"],
)
def test_a_request_over_a_limit_of_the_spec_is_told_the_limit(client: openai.OpenAI, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="images", prompt="a red digit seven", **asked)
    assert named in refused.value.message


def test_the_card_of_the_model_has_the_limits_of_the_spec(client: openai.OpenAI) -> None:
    limits = client.models.retrieve("images").model_extra["limits"]
    assert (limits["max_steps"], limits["max_pixels"], limits["max_images"]) == (5, 4096, 2)
    assert len(client.models.list().data) == 1


def test_the_ranks_are_those_of_the_spec(worker: WorkerProcess) -> None:
    assert [rank["state"] for rank in worker.state()["ranks"]] == ["ready", "ready"]
