# SPDX-License-Identifier: Apache-2.0
"""One rank of a `FakeRankGroup`: what it holds, awake and asleep, and how that goes wrong."""

from diffusion_worker.messages import MemoryReport, MemoryTag, SleepLevel

WEIGHTS_BYTES = 1_000_000


class FakeRank:
    """What one rank holds."""

    def __init__(self) -> None:
        self.asleep: list[MemoryTag] = []
        self.level: SleepLevel | None = None
        self.checksum: str | None = None
        self.probe: str | None = None
        self.leaked = 0
        # What is kept of adapters whose copies in memory are not what they were, by their ids.
        self.spoilt: dict[int, str] = {}
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

    def memory(self) -> MemoryReport:
        """As the rank tells of it."""
        return MemoryReport(WEIGHTS_BYTES, self.resident, WEIGHTS_BYTES, 0, ["1000-2000"], asleep=self.asleep, level=self.level)
