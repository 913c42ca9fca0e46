# SPDX-License-Identifier: Apache-2.0
"""A rank of a `FakeRankGroup`: its adapters and memory, awake and asleep, and its faults.

Real: its answers, as a rank sends them. Not real: the memory and the adapters that they are about.
"""

import hashlib
from typing import Any

from diffusion_worker.messages import ErrorReport, Fingerprint, MemoryReport, MemoryTag, SleepLevel, SleepTask, TaskAck, TaskStatus

WEIGHTS_BYTES = 1_000_000


def fake_digest(path: str) -> str:
    """The digest of the adapter in a folder that need not exist."""
    return "sha256:" + hashlib.sha256(path.encode()).hexdigest()


class FakeRank:
    """What one rank holds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asleep: list[MemoryTag] = []
        self.level: SleepLevel | None = None
        # Other weights than it should hold, or other things that it makes of a fixed seed.
        self.checksum: str | None = None
        self.probe: str | None = None
        # Bytes of its weights that it keeps when it sleeps.
        self.leaked = 0
        # What is kept of adapters whose copies in memory are not what they were, by their ids.
        self.spoilt: dict[int, str] = {}
        # They stay so although the adapters are loaded again.
        self.spoils_for_good = False

    @property
    def resident(self) -> int:
        """Bytes of weights on the device."""
        return self.leaked if MemoryTag.WEIGHTS in self.asleep else WEIGHTS_BYTES

    def load_adapter(self, lora_int_id: int) -> None:
        """Keep what is in its file."""
        if not self.spoils_for_good:
            self.spoilt.pop(lora_int_id, None)

    def sleep(self, level: SleepLevel) -> int:
        """Give everything back; returns the bytes."""
        before = self.resident
        self.asleep, self.level = list(MemoryTag), level
        return before - self.resident

    def wake(self, tags: list[MemoryTag] | None) -> int:
        """Have these again; a wake gives nothing back."""
        self.asleep = [tag for tag in self.asleep if tags is not None and tag not in tags]
        self.level = self.level if self.asleep else None
        return 0

    def act(self, task: Any, error: ErrorReport | None) -> TaskAck:
        """Do a task, of sleep or of waking, or fail with the error."""
        if error is not None:
            return TaskAck(task.task_id, TaskStatus.ERROR, self.number, 0, self.resident, error.code, error.message)
        freed = self.sleep(task.level) if isinstance(task, SleepTask) else self.wake(task.tags)
        return TaskAck(task.task_id, TaskStatus.SUCCESS, self.number, freed, self.resident)

    def fingerprint(self, adapters: dict[int, str], weights: str, probe: str) -> Fingerprint:
        """These weights, this probe and the adapters in these folders, but for what is spoilt on this rank."""
        assert not self.asleep, "there is nothing to fingerprint on a rank that sleeps"
        kept = {lora_int_id: f"{fake_digest(path)} {self.spoilt.get(lora_int_id, 'kept')}" for lora_int_id, path in adapters.items()}
        return Fingerprint(self.checksum or weights, kept, self.probe or probe)

    def memory(self) -> MemoryReport:
        """As the rank tells of it."""
        return MemoryReport(WEIGHTS_BYTES, self.resident, WEIGHTS_BYTES, 0, ["1000-2000"], asleep=self.asleep, level=self.level)
