# SPDX-License-Identifier: Apache-2.0
"""Verification after a wake: the ranks' contents and results are compared with those after the load."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Fingerprint, WakeCheck

log = logging.getLogger(__name__)

# Levels, of 255, by which a cell of the probe may differ from that of the load, where two probes of the load differ too.
TOLERANCE = 4
# The most by which two probes of the load may differ themselves. With more, wakes could miss the tolerance by chance.
LOAD_TOLERANCE = TOLERANCE // 2


class Verification:
    """The fingerprints of the ranks that were loaded last.

    `adapters` returns the reports of the ranks at each expected adapter's load, by its id. `load_again` makes the ranks reread adapters
    from their files, by id and within so many seconds.
    """

    def __init__(
        self,
        call_all: CallAll,
        adapters: Callable[[], Mapping[int, Sequence[str]]],
        load_again: Callable[[Collection[int], float], Awaitable[None]],
    ) -> None:
        # A fingerprint for each rank; none before the first load.
        self.recorded: list[Fingerprint] = []
        self._call_all = call_all
        self._adapters = adapters
        self._load_again = load_again

    async def take(self, *, timeout_s: float, contents: bool = True) -> list[Fingerprint]:
        """Take the ranks' fingerprints, in rank order, without `contents` those of the probe alone.

        Raise RequestError that names a rank, or GroupFailed.
        """
        replies = await self._call_all("fingerprint", timeout_s=timeout_s, probe=True, contents=contents)
        return [msgspec.msgpack.decode(reply.result or b"", type=Fingerprint) for reply in replies]

    async def record(self, *, timeout_s: float) -> None:
        """Take the fingerprints of ranks that have just loaded as the reference, and find how far their probes can be compared.

        A probe is taken a second time for that. Raise as `take` does.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        first = await self.take(timeout_s=timeout_s)
        unprobed = all(rank.probe is None for rank in first)
        second = first if unprobed else await self.take(timeout_s=_left_s(until_s), contents=False)
        self.recorded = [msgspec.structs.replace(before, check=check_of(before, now)) for before, now in zip(first, second, strict=True)]
        if (check := self.check) is WakeCheck.EXACT:
            log.info("wakes are verified check=%s", check)
            return
        levels = max(map(cell_distance, first, second))
        log.warning(
            "wakes are verified check=%s: the same small image, made twice after the load, differs by %d of 255 levels", check, levels
        )

    @property
    def check(self) -> WakeCheck | None:
        """The use of the probe in verifying a wake, that of the rank with the weakest; None before the first load."""
        return max((rank.check for rank in self.recorded), key=list(WakeCheck).index, default=None)

    async def verify(self, *, timeout_s: float) -> None:
        """Check that the ranks are as they were. Adapters that are not are loaded again once, as that is cheaper than a restart.

        Raises:
            RequestError: VerificationFailed with the rank and the difference, or as `take` does. GroupFailed.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        found = await self.take(timeout_s=timeout_s)
        self._require(difference(self.recorded, found))
        if not (wrong := wrong_adapters(self._adapters(), found)):
            return
        log.error("adapters differ after the wake and are loaded again: %s", "; ".join(wrong.values()))
        await self._load_again(wrong, _left_s(until_s))
        found = await self.take(timeout_s=_left_s(until_s))
        self._require(difference(self.recorded, found))
        self._require("; ".join(wrong_adapters(self._adapters(), found).values()) or None)

    def _require(self, problem: str | None) -> None:
        if problem is not None:
            raise RequestError(ErrorCode.VERIFICATION_FAILED, f"the verification of the wake failed: {problem}")


def difference(recorded: Sequence[Fingerprint], found: Sequence[Fingerprint]) -> str | None:
    """Return a message about the first rank whose weights or probe differ, or about another number of ranks; None if all agree. Pure."""
    if len(recorded) != len(found):
        return f"expected the fingerprints of {len(recorded)} ranks, found {len(found)}"
    for rank, (before, now) in enumerate(zip(recorded, found, strict=True)):
        if now.weights != before.weights:
            return f"rank {rank}: weights: expected the checksum {before.weights} of the load, found {now.weights}"
        if (problem := _probe_difference(before, now)) is not None:
            return f"rank {rank}: probe: {problem}"
    return None


def _probe_difference(before: Fingerprint, now: Fingerprint) -> str | None:
    if before.check is WakeCheck.CHECKSUMS or now.probe == before.probe:
        return None
    if before.check is WakeCheck.EXACT or now.probe is None:
        return f"expected a step from a fixed seed to have the result {before.probe} as after the load, found {now.probe}"
    if (levels := cell_distance(before, now)) > TOLERANCE:
        return f"expected each cell of a step's image within {TOLERANCE} of 255 levels of the load's, found a difference of {levels}"
    return None


def check_of(first: Fingerprint, second: Fingerprint) -> WakeCheck:
    """Return how later probes of a rank are compared, by two that one load made. Pure.

    It is EXACT if both are equal, TOLERANCE if their cells differ by at most `LOAD_TOLERANCE`, else CHECKSUMS, also without a probe.
    """
    if first.probe is None or second.probe is None:
        return WakeCheck.CHECKSUMS
    if first.probe == second.probe:
        return WakeCheck.EXACT
    return WakeCheck.TOLERANCE if cell_distance(first, second) <= LOAD_TOLERANCE else WakeCheck.CHECKSUMS


def cell_distance(one: Fingerprint, other: Fingerprint) -> int:
    """Return the largest difference of two probes' cells, 0 to 255; 255 where they have not the same number of cells. Pure."""
    if len(one.cells) != len(other.cells):
        return 255
    return max((abs(mine - theirs) for mine, theirs in zip(one.cells, other.cells, strict=True)), default=0)


def wrong_adapters(expected: Mapping[int, Sequence[str]], found: Sequence[Fingerprint]) -> dict[int, str]:
    """Return a message for each adapter, by id, that some rank reports differently from its load, lacks, or should not have. Pure.

    The message is about the first such rank. A report covers an adapter's file, its copy in memory, and its slot.
    """
    wrong: dict[int, str] = {}
    for rank, now in enumerate(found):
        for lora_int_id in sorted(expected.keys() | now.adapters.keys()):
            before = expected[lora_int_id][rank] if lora_int_id in expected else "none"
            after = now.adapters.get(lora_int_id, "none")
            if after != before:
                wrong.setdefault(lora_int_id, f"rank {rank}: adapter {lora_int_id}: expected {before} from its load, found {after}")
    return wrong


def _left_s(until_s: float) -> float:
    return max(0.001, until_s - asyncio.get_running_loop().time())
