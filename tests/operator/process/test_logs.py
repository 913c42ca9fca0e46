# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: a JSON line names its object and operation; a plain line stays as it is."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from diffusion_operator.__main__ import configure_logs
from diffusion_operator.errors import OperatorError
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result

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


async def lines_of_a_failing_pass(log_format: str, root: logging.Logger) -> list[str]:
    """Return the lines of a pass that logs a control call and then fails, and of a warning about no object.

    The operator's own set-up formats them.
    """
    root.handlers.clear()
    configure_logs(log_format)
    output = io.StringIO()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(output)

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


async def test_plain_lines_are_sentences(root: logging.Logger) -> None:
    call, failure, _ = await lines_of_a_failing_pass("plain", root)
    assert re.search(r"\[INFO *\] control call operation=o-1 worker=10\.0\.0\.1$", call)
    assert failure.endswith("reconcile failed object=DiffusionDeployment art/sdxl error=OperatorError: not today")
