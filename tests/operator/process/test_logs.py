# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: a JSON line names its object and operation; a plain line stays as it is."""

import asyncio
import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator

import kopf
import pytest
from kopf._core.actions import lifecycles
from kopf._core.engines.activities import ActivityError, run_activity
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.intents.causes import Activity
from kubernetes.aio.client import Configuration

from diffusion_operator.__main__ import configure_logs
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.connected import Connected
from diffusion_operator.errors import OperatorError
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.settings import Settings

log = logging.getLogger("diffusion_operator.reconcile.act")
KEY = Key("DiffusionDeployment", "art", "sdxl")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Provide the root logger and restore its handlers and level afterwards."""
    found = logging.getLogger()
    handlers, level = list(found.handlers), found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def collected(log_format: str, root: logging.Logger) -> io.StringIO:
    """Set up the logs as the operator does, and return the text that gets their lines."""
    root.handlers.clear()
    configure_logs(log_format)
    output = io.StringIO()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(output)
    return output


async def lines_of_a_failing_pass(log_format: str, root: logging.Logger) -> list[str]:
    """Return the lines of a pass that logs a control call and then fails, and of a warning about no object.

    The operator's own set-up formats them.
    """
    output = collected(log_format, root)

    async def reconcile(key: Key) -> Result:
        log.info("control call operation=%s worker=%s", "o-1", "10.0.0.1", extra={"operation": "o-1"})
        raise OperatorError("not today")

    queue = KeyedQueue(reconcile, resync_s=100, parallel=1, random=lambda: 0.5)
    queue.wake(KEY)
    await asyncio.sleep(0.3)
    await queue.close()
    log.warning("watch broken")
    return output.getvalue().splitlines()


async def test_each_line_of_a_pass_has_its_object_and_operation_as_fields(root: logging.Logger) -> None:
    call, failure, other = (json.loads(line) for line in await lines_of_a_failing_pass("json", root))
    about = {"kind": "DiffusionDeployment", "namespace": "art", "name": "sdxl"}
    assert (call["object"], call["operation"], call["severity"]) == (about, "o-1", "info")
    assert (failure["object"], failure["severity"]) == (about, "warn")
    assert "not today" in failure["message"]
    assert "object" not in other


async def test_plain_lines_are_sentences_after_the_whole_name_of_their_logger(root: logging.Logger) -> None:
    call, failure, _ = await lines_of_a_failing_pass("plain", root)
    assert re.search(r"\] diffusion_operator\.reconcile\.act \[INFO\] control call operation=o-1 worker=10\.0\.0\.1$", call)
    assert failure.endswith("reconcile failed object=DiffusionDeployment art/sdxl error=OperatorError: not today")


async def test_a_probe_that_passes_writes_no_line_and_one_that_fails_does(root: logging.Logger) -> None:
    settings = Settings(engine_image="i", operator_key=b"k" * 32)
    process = Process(settings)

    async def probe() -> None:
        """Run the probe's handlers as kopf does for each request of the kubelet."""
        await run_activity(
            lifecycle=lifecycles.all_at_once,
            registry=build_registry(process),
            settings=build_kopf_settings(),
            activity=Activity.PROBE,
            indices=OperatorIndexers().indices,
            memo=kopf.Memo(),
        )

    output = collected("plain", root)
    await probe()
    assert output.getvalue() == ""
    process.connected = Connected(settings, KubernetesCluster(Configuration()))
    process.connected._tasks = [asyncio.create_task(asyncio.sleep(0), name="listing pods in n")]
    await asyncio.wait(process.connected._tasks)
    with contextlib.suppress(ActivityError):
        await probe()
    assert "listing pods in n" in output.getvalue()
    await process.connected.close()
