# SPDX-License-Identifier: Apache-2.0
"""Sleeps and wakes that go wrong, over fake ranks: a model is never served half awake or changed, and never left in between."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diffusion_worker.engine.startup.wake_verification import difference, wrong_adapters
from diffusion_worker.engine.state.state_document import OperationResult, ProblemReport
from diffusion_worker.errors import ErrorCode, Fault, GroupFailed
from diffusion_worker.messages import ErrorReport, Fingerprint, MemoryTag, SleepLevel
from support.worker.fake_rank import WEIGHTS_BYTES
from support.worker.sleep_rig import KILLED, SleepRig, sleep_rig

pytestmark = pytest.mark.looptime

ALL = list(MemoryTag)
NO_MEMORY = ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "expected 4 GiB free, found 1 GiB")
BROKEN = ErrorReport(ErrorCode.RANK_FAILED, "no memory to map")


@pytest.fixture
async def rig() -> AsyncIterator[SleepRig]:
    async with sleep_rig() as rig:
        yield rig


def problem_of(result: OperationResult) -> ProblemReport:
    assert result.error is not None
    return result.error


# A wake that changes something


@pytest.mark.parametrize(
    ("corruption", "says"),
    [
        ({"checksum": "other"}, "rank 1: weights: expected the checksum weights of the load, found other"),
        ({"probe": "other"}, "rank 1: probe: expected a step from a fixed seed to have the result probe as after the load, found other"),
    ],
)
async def test_a_rank_that_woke_otherwise_is_never_served_from(rig: SleepRig, corruption: dict[str, Any], says: str) -> None:
    await rig.sleep()
    vars(rig.ranks.members[1]).update(corruption)
    rig.ranks.loading.clear()
    operation = rig.begin_wake()
    await rig.until("restarting")
    failure = rig.document.failure
    assert failure is not None and (failure.code, says in failure.message) == ("VerificationFailed", True)
    rig.ranks.loading.set()
    problem = problem_of(await rig.over(operation))
    assert (problem.code, says in problem.message) == ("VerificationFailed", True)
    document = rig.document
    assert (document.state, document.generation, document.failure) == ("ready", 2, None)
    assert document.last_loss is not None and says in document.last_loss.message
    assert rig.ranks.starts_asleep == [False, False]
    assert (await rig.image()).images


async def test_an_adapter_that_a_rank_does_not_have_after_a_wake_is_found(rig: SleepRig) -> None:
    """Take an adapter from the sleeping ranks; the wake must load it again, because a request for it would get the base model's image."""
    await rig.put("style")
    await rig.sleep()
    rig.ranks.registered.popitem()
    calls = len(rig.ranks.calls)
    assert (await rig.wake()).error is None
    assert rig.ranks.calls[calls:].count("add_lora") == 1
    assert (rig.adapters(), len(rig.ranks.registered), rig.document.generation) == ({"style": "Loaded"}, 1, 1)


async def test_an_adapter_whose_copy_changed_asleep_is_loaded_again_before_anything_is_served(rig: SleepRig) -> None:
    """Spoil one adapter on one of two ranks during the first sleep after its load; the wake must load that adapter again, and no other."""
    await rig.put("style")
    await rig.put("other")
    await rig.sleep()
    rig.ranks.members[1].spoilt[min(rig.ranks.registered)] = "other"
    calls = len(rig.ranks.calls)
    took = {one.name: one.load_seconds for one in rig.document.adapters}
    assert (await rig.wake()).error is None
    assert [one.name for one in rig.document.adapters if one.load_seconds != took[one.name]] == ["style"]
    assert [call for call in rig.ranks.calls[calls:] if "lora" in call] == ["remove_lora", "add_lora"]
    assert (rig.adapters(), rig.document.generation) == ({"style": "Loaded", "other": "Loaded"}, 1)
    assert rig.engine.adapter_loads.codes["VerificationFailed"] == 1
    assert [one.name for one in rig.document.adapters if one.verification_failed] == ["style"]


async def test_an_adapter_that_is_wrong_a_second_time_costs_the_group_which_is_started_again(rig: SleepRig) -> None:
    """Spoil an adapter on a rank for good: it is wrong again after its reload, which points to the rank's memory."""
    await rig.put("style")
    await rig.sleep()
    rig.ranks.members[1].spoilt[min(rig.ranks.registered)] = "other"
    rig.ranks.members[1].spoils_for_good = True
    problem = problem_of(await rig.wake())
    assert (problem.code, "rank 1: adapter 1: expected v1:" in problem.message) == ("VerificationFailed", True)
    assert (rig.adapters(), rig.document.generation) == ({"style": "Loaded"}, 2)
    assert (await rig.image()).images
    await rig.sleep()
    assert (await rig.wake()).error is None


async def test_an_adapter_that_is_wrong_and_whose_file_is_gone_is_failed_and_the_base_serves(rig: SleepRig) -> None:
    await rig.put("style")
    await rig.sleep()
    rig.ranks.members[0].spoilt[min(rig.ranks.registered)] = "other"
    rig.ranks.adapter_errors["/loras/style"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no such file")
    assert (await rig.wake()).error is None
    assert (rig.adapters(), list(rig.ranks.registered), rig.document.generation) == ({"style": "Failed"}, [], 1)
    assert (await rig.image()).images


async def test_an_adapter_that_the_ranks_have_and_nobody_knows_leaves_them(rig: SleepRig) -> None:
    """Give sleeping ranks an adapter that no table has; the wake must remove it, or it would keep its memory for ever."""
    await rig.sleep()
    rig.ranks.registered[7] = "/loras/stranger"
    assert (await rig.wake()).error is None
    assert list(rig.ranks.registered) == []


async def test_what_a_new_generation_loaded_is_recorded_anew(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.weights_checksum = "changed on disk"
    assert problem_of(await rig.wake()).code == "VerificationFailed"
    await rig.sleep()
    assert (await rig.wake()).error is None


PLAIN = Fingerprint("w", {1: "sha256:a 77"}, "p")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (PLAIN, None),
        (Fingerprint("v", PLAIN.adapters, "p"), "rank 1: weights"),
        (Fingerprint("w", PLAIN.adapters, None), "rank 1: probe"),
    ],
)
def test_ranks_are_compared_one_by_one_with_what_they_were(found: Fingerprint, says: str | None) -> None:
    problem = difference([PLAIN, PLAIN], [PLAIN, found])
    assert problem is None if says is None else problem is not None and says in problem


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({1: "sha256:a 77"}, {}),
        ({}, {1: "rank 1: adapter 1: expected sha256:a 77 from its load, found none"}),
        ({1: "sha256:b 77"}, {1: "rank 1: adapter 1: expected sha256:a 77 from its load, found sha256:b 77"}),
        ({1: "sha256:a 78"}, {1: "rank 1: adapter 1: expected sha256:a 77 from its load, found sha256:a 78"}),
        ({1: "sha256:a 77 misapplied"}, {1: "rank 1: adapter 1: expected sha256:a 77 from its load, found sha256:a 77 misapplied"}),
        ({1: "sha256:a 77", 2: "sha256:c 1"}, {2: "rank 1: adapter 2: expected none from its load, found sha256:c 1"}),
    ],
)
def test_adapters_are_compared_with_what_each_rank_told_at_their_load(found: dict[int, str], says: dict[int, str]) -> None:
    assert wrong_adapters({1: ["sha256:a 77", "sha256:a 77"]}, [PLAIN, Fingerprint("w", found, "p")]) == says


def test_fewer_ranks_than_were_recorded_are_a_difference() -> None:
    assert difference([PLAIN, PLAIN], [PLAIN]) is not None


# A wake that finds too little memory


@pytest.mark.parametrize("level", SleepLevel)
async def test_a_wake_without_memory_puts_every_rank_back_to_sleep_and_may_be_tried_again(rig: SleepRig, level: SleepLevel) -> None:
    await rig.sleep(level=level)
    rig.ranks.wake_errors = [NO_MEMORY]
    problem = problem_of(await rig.wake())
    assert (problem.code, problem.retryable) == ("InsufficientMemory", True)
    assert "rank 1: expected 4 GiB free" in problem.message
    assert (rig.engine.state, rig.asleep, rig.document.generation) == ("asleep", [ALL, ALL], 1)
    assert {rank.memory.level for rank in rig.document.ranks} == {level}
    assert (await rig.wake()).error is None


async def test_a_warm_up_without_memory_is_a_wake_without_memory(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    await rig.until("asleep")
    rig.ranks.method_errors["warm_up"] = NO_MEMORY
    assert problem_of(await rig.wake()).code == "InsufficientMemory"
    assert (rig.engine.state, rig.asleep) == ("asleep", [ALL, ALL])
    rig.ranks.method_errors.clear()
    assert (await rig.wake()).error is None


async def test_ranks_that_cannot_be_put_back_are_started_again_asleep(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.wake_errors, rig.ranks.sleep_errors = [NO_MEMORY], [BROKEN]
    assert problem_of(await rig.wake()).code == "InsufficientMemory"
    assert (rig.engine.state, rig.ranks.starts_asleep) == ("asleep", [False, True])


# A wake that fails, or hangs


async def test_an_error_of_one_rank_is_told_with_its_number_and_new_ranks_are_awake(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.wake_errors = [ErrorReport(ErrorCode.ENGINE_FAILED, "the weights file changed")]
    problem = problem_of(await rig.wake())
    assert (problem.code, problem.message) == ("EngineFailed", "wake: rank 1: the weights file changed")
    assert (rig.engine.state, rig.ranks.starts_asleep) == ("ready", [False, False])
    assert (await rig.image()).images


@pytest.mark.parametrize("method", ["handle_wake_task", "fingerprint"])
async def test_a_wake_that_hangs_ends_at_its_deadline_with_new_ranks(rig: SleepRig, method: str) -> None:
    await rig.sleep()
    rig.ranks.hanging.add(method)
    operation = rig.begin_wake(deadline_seconds=7.0)
    await rig.until("restarting")
    rig.ranks.hanging.clear()
    assert asyncio.get_running_loop().time() == pytest.approx(7.0)
    assert problem_of(await rig.over(operation)).code == "Timeout"
    document = rig.document
    assert (document.state, document.generation) == ("ready", 2)
    assert document.last_loss is not None and document.last_loss.fault is Fault.STALLED


async def test_a_first_wake_whose_warm_up_hangs_ends_at_its_deadline(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    await rig.until("asleep")
    rig.ranks.hanging.add("warm_up")
    operation = rig.begin_wake(deadline_seconds=7.0)
    await rig.until("restarting")
    rig.ranks.hanging.clear()
    assert problem_of(await rig.over(operation)).code == "Timeout"
    assert rig.engine.state == "ready"


# A sleep that fails, hangs, or gives nothing back


async def test_a_sleep_that_one_rank_refuses_is_undone_on_all_and_verified_before_the_model_serves(rig: SleepRig) -> None:
    before = rig.ranks.counts["fingerprint"]
    rig.ranks.sleep_errors = [BROKEN]
    problem = problem_of(await rig.sleep())
    assert (problem.code, problem.message) == ("RankFailed", "sleep: rank 1: no memory to map")
    assert (rig.engine.state, rig.asleep, rig.document.generation) == ("ready", [[], []], 1)
    assert rig.ranks.counts["fingerprint"] == before + 1
    assert (await rig.image()).images


async def test_a_sleep_that_cannot_be_undone_ends_with_new_ranks_that_are_awake(rig: SleepRig) -> None:
    rig.ranks.sleep_errors, rig.ranks.wake_errors = [BROKEN], [BROKEN]
    assert problem_of(await rig.sleep()).code == "RankFailed"
    assert (rig.engine.state, rig.ranks.starts_asleep) == ("ready", [False, False])
    assert (await rig.image()).images


async def test_a_failed_sleep_whose_undoing_changes_something_is_not_served_from(rig: SleepRig) -> None:
    rig.ranks.sleep_errors = [BROKEN]
    rig.ranks.members[0].checksum = "other"
    await rig.sleep()
    assert (rig.engine.state, rig.document.generation) == ("ready", 2)


async def test_a_sleep_that_hangs_ends_with_new_ranks_that_sleep(rig: SleepRig) -> None:
    rig.ranks.hanging.add("handle_sleep_task")
    assert problem_of(await rig.sleep()).code == "Timeout"
    assert (rig.engine.state, rig.ranks.starts_asleep) == ("asleep", [False, True])
    assert asyncio.get_running_loop().time() == pytest.approx(300.0)


async def test_ranks_that_are_not_done_with_their_steps_are_not_put_to_sleep(rig: SleepRig) -> None:
    rig.ranks.method_errors["synchronize"] = ErrorReport(ErrorCode.RANK_FAILED, "a copy failed")
    assert problem_of(await rig.sleep()).message == "a copy failed"
    assert (rig.engine.state, rig.ranks.calls) == ("ready", [])


async def test_memory_that_is_not_given_back_is_looked_for_twice_and_then_the_ranks_start_again_asleep(rig: SleepRig) -> None:
    rig.ranks.members[1].leaked = WEIGHTS_BYTES // 40
    problem = problem_of(await rig.sleep())
    assert (problem.code, problem.retryable) == ("MemoryNotReleased", True)
    assert "rank 1: expected at most 20000 bytes left on the device, 2% of its weights, found 25000 bytes" in problem.message
    assert (rig.engine.state, rig.ranks.starts_asleep, rig.asleep) == ("asleep", [False, True], [ALL, ALL])
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)


async def test_a_little_memory_that_stays_is_none_of_the_weights(rig: SleepRig) -> None:
    rig.ranks.members[1].leaked = WEIGHTS_BYTES // 50
    assert (await rig.sleep()).error is None


# A rank that dies in the middle


@pytest.mark.parametrize(("method", "asleep"), [("synchronize", False), ("handle_sleep_task", True)])
async def test_ranks_that_are_lost_in_a_sleep_end_it_asleep(rig: SleepRig, method: str, asleep: bool) -> None:
    rig.ranks.killers[method] = KILLED
    assert (await rig.sleep()).error is None
    # Ranks that were lost before they got the call are not known to be idle: they start awake, and then sleep.
    assert (rig.engine.state, rig.ranks.starts_asleep, rig.asleep) == ("asleep", [False, asleep], [ALL, ALL])
    assert (await rig.wake()).error is None


@pytest.mark.parametrize("method", ["handle_wake_task", "fingerprint"])
async def test_ranks_that_are_lost_in_a_wake_end_it_awake(rig: SleepRig, method: str) -> None:
    await rig.sleep()
    rig.ranks.killers[method] = KILLED
    assert (await rig.wake()).error is None
    assert (rig.engine.state, rig.ranks.starts_asleep) == ("ready", [False, False])
    assert (await rig.image()).images


async def test_ranks_that_are_lost_while_they_drain_finish_their_requests_and_then_sleep(rig: SleepRig) -> None:
    request = await rig.running()
    operation = rig.begin_sleep()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    rig.ranks.stepping.set()
    assert (await rig.over(operation)).error is None
    assert (await request).images
    assert rig.engine.state == "asleep"


async def test_ranks_that_are_lost_asleep_come_back_asleep_and_their_first_wake_brings_everything(rig: SleepRig) -> None:
    await rig.put("style")
    await rig.sleep()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    await rig.until("asleep")
    assert (rig.ranks.starts_asleep, rig.asleep, rig.adapters()) == ([False, True], [ALL, ALL], {"style": "Deferred"})
    assert (await rig.wake()).error is None
    assert (rig.adapters(), (await rig.image(model="style")).images != []) == ({"style": "Loaded"}, True)


async def test_ranks_that_are_lost_twice_in_a_sleep_are_still_put_to_sleep(rig: SleepRig) -> None:
    rig.ranks.killers["handle_sleep_task"] = KILLED
    rig.ranks.restart_errors = [GroupFailed("rank 0 (pid 9) was ended by SIGKILL")]
    assert (await rig.sleep()).error is None
    assert (rig.engine.state, rig.document.restarts) == ("asleep", 2)


async def test_a_group_that_does_not_come_back_ends_the_operation_with_the_engine() -> None:
    async with sleep_rig(max_restarts=0) as rig:
        rig.ranks.killers["handle_sleep_task"] = KILLED
        assert problem_of(await rig.sleep()).code == "EngineFailed"
        assert rig.engine.state == "failed"


async def test_a_defect_of_ours_in_a_sleep_ends_the_engine_as_nothing_is_known_then(rig: SleepRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.engine.sleep.rank_tasks.unreleased", lambda ranks: 1 / 0)
    assert "sleep failed unexpectedly: ZeroDivisionError" in problem_of(await rig.sleep()).message
    assert rig.engine.state == "failed"
