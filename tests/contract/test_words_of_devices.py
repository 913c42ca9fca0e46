# SPDX-License-Identifier: Apache-2.0
"""Real workers whose device is full or kept by another process: the exit code, and the operator's reason for the last words."""

import pytest

from diffusion_operator.api.meta import condition_of
from diffusion_operator.plan.observed.pods import Container, Exit
from support.operator.plan_builders import planned, pod
from support.worker.process import WorkerProcess


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extension", "reason", "says"),
    [
        ("DeviceInUse", "GPUUnavailable", "cuda:0 cannot be used: CUDA error: CUDA-capable device(s) is/are busy"),
        ("DeviceFull", "InsufficientGPUMemory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["kept by another process", "full"],
)
def test_the_last_words_of_a_worker_about_its_device_are_the_operators_reason(extension: str, reason: str, says: str) -> None:
    with WorkerProcess(options=(f"--worker-extension=support.worker.extensions:{extension}",)) as worker:
        assert worker.wait_exit(600) == 70
        words = worker.termination_log.read_text()
    assert says in words
    ended = Container(restarts=1, waiting_reason="CrashLoopBackOff", last_exit=Exit(code=70, message=words))
    ready = condition_of(planned(pod(ready=False, container=ended)).status.conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", reason)
    assert says in ready.message
