# SPDX-License-Identifier: Apache-2.0
"""Whether ranks hold after a wake what they held when they were loaded, and make the same of it: compared, never assumed."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from diffusion_worker.engine.adapter_ranks import CallAll
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Fingerprint


class Verification:
    """The fingerprints of the ranks that were loaded last. `adapters` are the digests that the ranks are to have now, by id."""

    def __init__(self, call_all: CallAll, adapters: Callable[[], Mapping[int, str]]) -> None:
        # One for each rank; none before the first load.
        self.recorded: list[Fingerprint] = []
        # What each rank was found to keep of each adapter: an id never stands for other bytes.
        self._kept: dict[tuple[int, int], str] = {}
        self._call_all = call_all
        self._adapters = adapters

    async def take(self, *, timeout_s: float) -> list[Fingerprint]:
        """What the ranks hold now, in their order; raises RequestError that names a rank, GroupFailed."""
        replies = await self._call_all("fingerprint", timeout_s=timeout_s, probe=True)
        return [msgspec.msgpack.decode(reply.result or b"", type=Fingerprint) for reply in replies]

    async def record(self, *, timeout_s: float) -> None:
        """Ranks that have just loaded are what later ones are compared with; raises as `take` does."""
        self.recorded = await self.take(timeout_s=timeout_s)

    async def verify(self, *, timeout_s: float) -> None:
        """Raises RequestError, VerificationFailed with the rank and what differs there, or as `take` does; GroupFailed."""
        found = await self.take(timeout_s=timeout_s)
        if (problem := difference(self.recorded, found, self._adapters(), self._kept)) is not None:
            raise RequestError(ErrorCode.VERIFICATION_FAILED, f"the wake cannot be trusted: {problem}")
        self._kept = {(rank, lora_int_id): kept for rank, each in enumerate(found) for lora_int_id, kept in each.adapters.items()}


def difference(
    recorded: Sequence[Fingerprint], found: Sequence[Fingerprint], adapters: Mapping[int, str], kept: Mapping[tuple[int, int], str]
) -> str | None:
    """The first rank that is not as it was, and in what; None where all are. Pure.

    A rank tells of an adapter its file's digest, and after a space a checksum of what it keeps of it: `kept` has those that were
    found before, by rank and id.
    """
    if len(recorded) != len(found):
        return f"expected the fingerprints of {len(recorded)} ranks, found {len(found)}"
    for rank, (before, now) in enumerate(zip(recorded, found, strict=True)):
        digests = {lora_int_id: told.partition(" ")[0] for lora_int_id, told in now.adapters.items()}
        changed = {lora_int_id for lora_int_id, told in now.adapters.items() if kept.get((rank, lora_int_id), told) != told}
        if now.weights != before.weights:
            return f"rank {rank}: weights: expected the checksum {before.weights} of the load, found {now.weights}"
        if digests != adapters:
            return f"rank {rank}: adapters: expected {_shown(adapters)}, found {_shown(digests)}"
        if changed:
            return f"rank {rank}: adapters: expected their copies in memory as they were, found others of {sorted(changed)}"
        if now.probe != before.probe:
            return f"rank {rank}: probe: expected a step from a fixed seed to make {before.probe} as after the load, found {now.probe}"
    return None


def _shown(digests: Mapping[int, str]) -> str:
    return ", ".join(f"{lora_int_id}: {digest}" for lora_int_id, digest in sorted(digests.items())) or "none"
