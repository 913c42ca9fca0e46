# SPDX-License-Identifier: Apache-2.0
"""A rank's answers to tasks of sleeping and waking: always one, and the same one if the task is repeated."""

from collections.abc import Callable

import pytest
import torch

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.messages import SleepLevel, SleepTask, TaskAck, TaskStatus, WakeTask
from diffusion_worker.runner.model_call.faults import RankFault
from diffusion_worker.runner.task_acks import MOST_REMEMBERED, TaskAcks


class Memory:
    """A stand-in for a rank's memory: bytes that sleep and wake change, counts of sleeps and of cleanups, and the acknowledgements."""

    def __init__(self) -> None:
        self.held = 1000
        self.cleaned = 0
        self.slept = 0
        self.acks = TaskAcks(3, resident_bytes=lambda: self.held, free_memory=self.clean)

    def clean(self) -> None:
        self.cleaned += 1

    def sleep(self) -> None:
        self.held, self.slept = 20, self.slept + 1

    def wake(self) -> None:
        self.held = 1000


@pytest.fixture
def memory() -> Memory:
    return Memory()


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_what_a_sleep_freed_is_measured_and_a_wake_frees_nothing(memory: Memory) -> None:
    slept = memory.acks.acknowledge(SleepTask("s"), memory.sleep)
    assert slept == TaskAck("s", TaskStatus.SUCCESS, 3, freed_bytes=980, resident_bytes=20)
    woken = memory.acks.acknowledge(WakeTask("w"), memory.wake)
    assert woken == TaskAck("w", TaskStatus.SUCCESS, 3, freed_bytes=0, resident_bytes=1000)


def test_a_task_that_is_repeated_gets_the_same_answer_and_is_not_done_again(memory: Memory) -> None:
    first = memory.acks.acknowledge(SleepTask("s"), memory.sleep)
    memory.acks.acknowledge(WakeTask("w"), memory.wake)
    assert memory.acks.acknowledge(SleepTask("s"), memory.sleep) == first
    assert (memory.slept, memory.held) == (1, 1000)


def test_a_sleep_and_a_wake_of_one_id_are_two_tasks(memory: Memory) -> None:
    memory.acks.acknowledge(WakeTask("o"), memory.wake)
    assert memory.acks.acknowledge(SleepTask("o", SleepLevel.DISCARD), memory.sleep).freed_bytes == 980


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RequestError(ErrorCode.INSUFFICIENT_MEMORY, "no room"), "InsufficientMemory", "no room"),
        (MemoryError("8 GiB"), "InsufficientMemory", "MemoryError: 8 GiB"),
        (torch.OutOfMemoryError("CUDA out of memory"), "InsufficientMemory", "OutOfMemoryError: CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "InsufficientMemory", "RuntimeError: DefaultCPUAllocator"),
        (OSError("read: I/O error"), "RankFailed", "OSError: read: I/O error"),
    ],
)
def test_an_error_is_an_answer_after_which_the_task_can_be_tried_again(memory: Memory, error: Exception, code: str, says: str) -> None:
    failed = memory.acks.acknowledge(WakeTask("w"), raising(error))
    assert (failed.status, failed.error_code, memory.cleaned) == (TaskStatus.ERROR, code, 1)
    assert failed.error_msg is not None and failed.error_msg.startswith(says)
    assert memory.acks.acknowledge(WakeTask("w"), memory.wake).status is TaskStatus.SUCCESS


def test_a_fault_that_the_rank_cannot_survive_is_no_answer(memory: Memory) -> None:
    with pytest.raises(RankFault) as ended:
        memory.acks.acknowledge(WakeTask("w"), raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert ended.value.fault is Fault.DEVICE


def test_only_the_newest_tasks_are_remembered(memory: Memory) -> None:
    for number in range(MOST_REMEMBERED + 1):
        memory.acks.acknowledge(SleepTask(str(number)), memory.sleep)
    memory.acks.acknowledge(SleepTask("1"), memory.sleep)
    assert memory.slept == MOST_REMEMBERED + 1
    memory.acks.acknowledge(SleepTask("0"), memory.sleep)
    assert memory.slept == MOST_REMEMBERED + 2
