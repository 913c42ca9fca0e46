# SPDX-License-Identifier: Apache-2.0
"""The operator's own client against the worker's real server, over sockets, so that neither side changes alone.

The ranks are fake, which makes every row quick.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DrainMode
from diffusion_operator.api.merged_state import merged
from diffusion_operator.api.worker_state import RecordState, WorkerPhase
from diffusion_operator.errors import ControlUnreachable
from diffusion_operator.plan.adapters.load_attempts import RACES
from diffusion_operator.plan.adapters.mounted_file import packed
from diffusion_operator.render.desired_config import desired_config
from diffusion_worker.engine.sleep.policy import read_desired
from diffusion_worker.engine.state.state_document import AdapterState, EngineState, RankState
from diffusion_worker.errors import RETRYABLE, STATUS, ErrorCode
from support.operator.worker_driver import TOKEN, Driver, refusal
from support.worker.fake_rank_group import fake_digest
from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess


@pytest.fixture(scope="module")
def fake_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(DIGITS_MODEL, ranks=2, program=FAKE_PROGRAM, token=TOKEN) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture
async def driver(fake_worker: WorkerProcess) -> AsyncIterator[Driver]:
    """Provide a client of a worker that is awake and has no adapters, and restore that state afterwards."""
    driver = Driver(fake_worker)
    yield driver
    await driver.clear()
    await driver.client.close()


# Names that both sides know


def test_the_operator_knows_every_state_of_the_worker() -> None:
    assert {state.value for state in EngineState} <= {phase.value for phase in WorkerPhase}
    assert {state.value for state in AdapterState} == {state.value for state in RecordState}
    assert {state.value for state in RankState} == {"starting", "ready", "asleep", "dead"}


def test_the_codes_that_the_operator_takes_for_races_are_codes_of_the_worker() -> None:
    codes = {code.value: code for code in ErrorCode}
    assert set(codes) >= RACES
    assert all(code in STATUS for code in ErrorCode)
    assert {code for code in RACES if codes[code] not in RETRYABLE} == {"Conflict", "WrongBoot", "StaleEpoch"}


def test_the_desired_file_that_the_operator_mounts_is_read_by_the_worker(tmp_path: Path) -> None:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"model": {"source": {"path": "/m"}}, "sleep": {"policy": "Asleep"}}
    manifest = desired_config(msgspec.convert({"metadata": metadata, "spec": spec}, DiffusionDeployment), packed(()))
    path = tmp_path / "desired.json"
    path.write_text(manifest["data"]["desired.json"])
    assert read_desired(str(path)).sleep.policy == "Asleep"


# Calls


async def test_the_operator_reads_the_state_document(driver: Driver) -> None:
    await driver.put("stripes", driver.lora("stripes"), scale=0.5)
    state = await driver.state()
    assert (state.boot_id, state.state, state.generation) == (driver.address.boot_id, WorkerPhase.READY, 1)
    assert (state.load.stage, state.load.bytes_done, state.load.bytes_total) == ("Done", 1_000_000, 1_000_000)
    assert (state.model.pipeline, state.model.size_bytes) == ("FakePipeline", 1_000_000)
    assert [(rank.rank, rank.state) for rank in state.ranks] == [(0, "ready"), (1, "ready")]
    [adapter] = state.adapters
    assert (adapter.name, adapter.state, adapter.digest, adapter.scale) == ("stripes", "Loaded", fake_digest(driver.lora("stripes")), 0.5)
    assert (adapter.source.path, adapter.ranks_loaded, adapter.ranks_total, adapter.rank) == (driver.lora("stripes"), 2, 2, 8)


async def test_the_state_document_is_read_while_the_worker_starts() -> None:
    with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, token=TOKEN, env={"FAKE_WORKER": json.dumps({"loadSeconds": 60})}) as worker:
        driver = Driver(worker)
        state = await driver.state()
        assert (state.state, state.adapters) == (WorkerPhase.STARTING, ())
        for call in (driver.put("x", "/x"), driver.sleep(), driver.wake()):
            assert (await refusal(call)).code in RACES
        await driver.client.close()


@pytest.mark.parametrize("mode", list(DrainMode))
async def test_every_drain_mode_of_the_operator_is_one_of_the_worker(driver: Driver, mode: DrainMode) -> None:
    await driver.sleep(mode)
    await driver.wait_for(WorkerPhase.ASLEEP)


async def test_adapters_come_change_and_go(driver: Driver) -> None:
    await driver.put("style", driver.lora("one"), digest=fake_digest(driver.lora("one")))
    await driver.put("style", driver.lora("one"), scale=-0.25)
    await driver.put("style", driver.lora("two"))
    [adapter] = [one for one in (await driver.state()).adapters if one.state != "Draining"]
    assert (adapter.digest, adapter.scale) == (fake_digest(driver.lora("two")), 1.0)
    await driver.remove("style")
    assert (await driver.state()).adapters == ()


async def test_the_operator_keeps_the_records_that_did_not_change(driver: Driver) -> None:
    for name in ("a", "b", "d"):
        await driver.put(name, driver.lora("one"))
    before = await driver.state()
    await driver.put("b", driver.lora("one"), scale=0.5)
    await driver.remove("d")
    after = merged(before, await driver.state(after=before.revision, wait_s=5))
    assert {one.name: one.scale for one in after.adapters} == {"a": 1.0, "b": 0.5}
    assert after.named["a"][0] is before.named["a"][0]
    for name in ("a", "b"):
        await driver.remove(name)


async def test_removing_what_is_not_there_is_no_error(driver: Driver) -> None:
    await driver.remove("nobody", drain_s=0)


async def test_a_refused_adapter_is_an_error_that_is_not_tried_again_and_a_record(driver: Driver) -> None:
    error = await refusal(driver.put("bad", driver.lora("broken")))
    assert (error.code, error.retryable, error.status) == ("InvalidAdapter", False, 400)
    [record] = (await driver.state()).adapters
    assert record.state == "Failed" and record.error is not None
    assert (record.error.code, record.error.message) == ("InvalidAdapter", str(error))


async def test_a_load_over_its_deadline_may_be_tried_again(driver: Driver) -> None:
    error = await refusal(driver.put("slow", driver.lora("slow"), deadline_s=1))
    assert (error.code, error.retryable, error.status) == ("Timeout", True, 504)


async def test_the_record_of_an_adapter_has_what_its_status_is_made_of(driver: Driver) -> None:
    await driver.put("style", driver.lora("one"), residency=Residency.RESIDENT, priority=7)
    [record] = (await driver.state()).adapters
    assert (record.format, record.residency, record.priority, record.requests_total) == ("peft", Residency.RESIDENT, 7, 0)
    assert record.last_request_age_seconds is None


async def test_calls_for_an_earlier_boot_change_nothing(fake_worker: WorkerProcess, driver: Driver) -> None:
    stale = Driver(fake_worker, boot_id="an-earlier-boot")
    for call in (stale.put("x", stale.lora("x")), stale.remove("x"), stale.sleep(), stale.wake()):
        error = await refusal(call)
        assert (error.code, error.status, error.retryable) == ("WrongBoot", 409, False)
    assert (await driver.state()).state is WorkerPhase.READY
    await stale.client.close()


async def test_a_wrong_token_is_refused(fake_worker: WorkerProcess) -> None:
    stranger = Driver(fake_worker, token="wrong")
    for call in (stranger.state(), stranger.put("x", "/x"), stranger.remove("x"), stranger.sleep(), stranger.wake()):
        error = await refusal(call)
        assert (error.code, error.status) == ("Unauthorized", 401)
    await stranger.client.close()


async def test_a_worker_that_is_gone_is_unreachable() -> None:
    with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, token=TOKEN) as worker:
        driver = Driver(worker)
        worker.wait_ready()
        await driver.state()
        assert worker.terminate() == 0
        with pytest.raises(ControlUnreachable):
            await driver.state()
        await driver.client.close()
