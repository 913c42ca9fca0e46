# SPDX-License-Identifier: Apache-2.0
"""The comparison of ranks with themselves after a load: how far two probes of it let later ones differ, and what a wake finds."""

import logging
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from diffusion_worker.engine.startup.wake_verification import LOAD_TOLERANCE, TOLERANCE, Verification, check_of, difference
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import Fingerprint, RpcReply, WakeCheck


def probed(level: int, *, digest: str | None = None, weights: str = "weights") -> Fingerprint:
    """Return a fingerprint of a probe with one cell of this level; without `digest` equal levels have equal digests."""
    return Fingerprint(weights, {}, digest or f"digest of {level}", bytes([100, level]))


class Ranks:
    """Ranks whose fingerprints a test gives: each call takes the next list, with a fingerprint for each rank."""

    def __init__(self, *answers: list[Fingerprint]) -> None:
        self._answers = list(answers)
        self.with_contents: list[bool] = []
        self.verification = Verification(self._call, dict, self._load_again)

    async def _call(self, method: str, **arguments: Any) -> list[RpcReply]:
        assert (method, arguments["probe"]) == ("fingerprint", True)
        self.with_contents.append(arguments["contents"])
        return [RpcReply(rank, 0, msgspec.msgpack.encode(found)) for rank, found in enumerate(self._answers.pop(0))]

    async def _load_again(self, adapters: Collection[int], timeout_s: float) -> None:
        raise AssertionError("no adapter is loaded")

    async def record(self) -> WakeCheck | None:
        await self.verification.record(timeout_s=60)
        return self.verification.check


@pytest.mark.parametrize(
    ("first", "second", "check"),
    [
        (probed(9), probed(9), WakeCheck.EXACT),
        (probed(9), probed(9, digest="other bits"), WakeCheck.TOLERANCE),
        (probed(9), probed(9 + LOAD_TOLERANCE), WakeCheck.TOLERANCE),
        (probed(9), probed(9 + LOAD_TOLERANCE + 1), WakeCheck.CHECKSUMS),
        (Fingerprint("weights"), Fingerprint("weights"), WakeCheck.CHECKSUMS),
    ],
)
def test_two_probes_of_the_load_decide_how_later_ones_are_compared(first: Fingerprint, second: Fingerprint, check: WakeCheck) -> None:
    assert check_of(first, second) is check


async def test_the_second_probe_of_a_load_reads_no_weights_again() -> None:
    ranks = Ranks([probed(9)], [probed(9)])
    await ranks.record()
    assert ranks.with_contents == [True, False]


@pytest.mark.parametrize(
    ("check", "now", "says"),
    [
        (WakeCheck.EXACT, probed(9), None),
        (WakeCheck.EXACT, probed(9, digest="other bits"), "probe: expected a step from a fixed seed to have the result digest of 9"),
        (WakeCheck.TOLERANCE, probed(9 + TOLERANCE), None),
        (WakeCheck.TOLERANCE, probed(9 + TOLERANCE + 1), "found a difference of 5"),
        (WakeCheck.TOLERANCE, Fingerprint("weights"), "found None"),
        (WakeCheck.TOLERANCE, msgspec.structs.replace(probed(9, digest="another size"), cells=b"1"), "found a difference of 255"),
        (WakeCheck.CHECKSUMS, probed(200), None),
        *((check, probed(9, weights="corrupted"), "weights: expected the checksum weights") for check in WakeCheck),
    ],
)
def test_a_wake_finds_corrupted_weights_in_every_way_and_another_image_by_its_tolerance(
    check: WakeCheck, now: Fingerprint, says: str | None
) -> None:
    recorded = msgspec.structs.replace(probed(9), check=check)
    problem = difference([recorded], [now])
    assert problem is None if says is None else problem is not None and says in problem


async def test_the_rank_whose_probes_repeat_least_decides_what_the_log_and_the_state_say(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks([probed(9), probed(20)], [probed(9), probed(22)])
    assert ranks.verification.check is None
    with caplog.at_level(logging.INFO):
        assert await ranks.record() is WakeCheck.TOLERANCE
    assert "wakes are verified check=Tolerance: the same small image, made twice after the load, differs by 2 of 255 levels" in caplog.text
    assert [rank.check for rank in ranks.verification.recorded] == [WakeCheck.EXACT, WakeCheck.TOLERANCE]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert await Ranks([probed(9)], [probed(9)]).record() is WakeCheck.EXACT
    assert [record.levelname for record in caplog.records] == ["INFO"]


async def test_a_model_without_a_probe_is_asked_for_one_once() -> None:
    assert await Ranks([Fingerprint("weights")]).record() is WakeCheck.CHECKSUMS


async def test_ranks_that_never_repeat_a_probe_wake_and_those_that_are_spoilt_do_not() -> None:
    ranks = Ranks([probed(9)], [probed(10)], [probed(8)], [probed(9, weights="corrupted")], [probed(40)])
    await ranks.record()
    await ranks.verification.verify(timeout_s=60)
    for spoilt in ("weights", "probe"):
        with pytest.raises(RequestError, match=f"the verification of the wake failed: rank 0: {spoilt}"):
            await ranks.verification.verify(timeout_s=60)
