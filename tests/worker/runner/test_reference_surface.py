# SPDX-License-Identifier: Apache-2.0
"""Names of the reference system (docs/development/reference-system.md) that no other test calls, each tested by its effect."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import (
    Dropped,
    LoRAUse,
    MemoryTag,
    Rpc,
    RpcReply,
    Shutdown,
    SleepTask,
    TaskStatus,
    Tick,
    WakeTask,
)
from diffusion_worker.ranks.broadcast import RankEnd, ServerEnd
from diffusion_worker.ranks.output import RankSender
from diffusion_worker.ranks.worker_proc import WorkerProc
from diffusion_worker.runner.diffusion_worker import DiffusionWorker, Rendezvous
from diffusion_worker.runner.loading.adapter_layers import create_lora_manager
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.profiler import RankProfiler
from diffusion_worker.runner.stepping.pixels import pixels_of
from support.runner.rig import OneRank, request
from support.worker.process import DIGITS, DIGITS_MODEL
from support.worker.real_ranks import ranks, results

STRIPES = LoRARequest("stripes", 1, str(DIGITS / "loras" / "stripes"))
STYLED = request("styled", loras=[LoRAUse(1, 1.0)])


@contextmanager
def one_worker(**config: Any) -> Iterator[DiffusionWorker]:
    """Make a rank's worker with a process group of its own and without a model, and yield it; shut it down afterwards.

    It has one torch thread meanwhile.
    """
    given = WorkerConfig(**{"model": str(DIGITS_MODEL), "served_name": "digits", "max_loras": 2} | config)
    threads = torch.get_num_threads()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        made = DiffusionWorker(given, rank=0, rendezvous=Rendezvous(host, port, generation=1), listener=listener)
    # Two threads on a busy machine wait for each other longer than they compute.
    torch.set_num_threads(1)
    try:
        yield made
    finally:
        if torch.distributed.is_initialized():
            made.shutdown()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def worker() -> Iterator[DiffusionWorker]:
    with one_worker() as made:
        made.load_model(lambda done, total: None)
        yield made


@pytest.fixture
def fresh(worker: DiffusionWorker) -> DiffusionWorker:
    """Provide the module's worker with a new adapter manager, which knows no adapters; the weights stay loaded."""
    worker.init_lora_manager()
    return worker


def wrapped(worker: DiffusionWorker) -> int:
    """Return how many layers of the worker's transformer are wrapped to hold adapters in slots."""
    return sum(isinstance(part, LoRALayer) for part in worker.model_runner.pipeline.transformer.modules())


# --- the worker -----------------------------------------------------------------------------------------------------------


def test_a_worker_joins_its_group_when_it_is_made_and_leaves_it_at_the_shutdown() -> None:
    with one_worker() as worker:
        assert torch.distributed.is_initialized()
        assert (worker.device.type, worker.parallel.world) == ("cpu", 1)
        worker.shutdown()
        assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_worker_makes_one_image_as_its_steps_do_by_both_names(fresh: DiffusionWorker) -> None:
    fresh.add_lora(request=STRIPES, options=LoadOptions())
    stepped = {}
    for number in range(20):
        output = fresh.execute_stepwise(Tick(number, [STYLED] if number == 0 else []))
        stepped |= output.images
    image = fresh.execute_model(STYLED)
    assert (image.dtype, image.shape) == (np.uint8, (32, 32, 3))
    np.testing.assert_array_equal(image, pixels_of(stepped["styled"]))
    np.testing.assert_array_equal(fresh.generate(STYLED), image)
    assert not np.array_equal(fresh.generate(request("base")), image)


def test_a_request_that_runs_already_waits_for_the_one_that_is_made_alone(fresh: DiffusionWorker) -> None:
    alone = fresh.execute_model(request("runs", steps=3))
    fresh.execute_stepwise(Tick(1, [request("runs", steps=3)]))
    fresh.execute_model(request("between"))
    images: dict[str, Any] = {}
    for number in range(2, 20):
        images |= fresh.execute_stepwise(Tick(number)).images
    np.testing.assert_array_equal(pixels_of(images["runs"]), alone)


def test_a_request_is_refused_while_another_has_the_model_for_itself_which_runs_on(fresh: DiffusionWorker) -> None:
    fresh.execute_stepwise(Tick(1, [request("alone", steps=3, whole=True)]))
    with pytest.raises(RequestError, match="'between' cannot run: request 'alone' has the model for itself") as refused:
        fresh.execute_model(request("between"))
    assert refused.value.code is ErrorCode.BUSY
    images: dict[str, Any] = {}
    for number in range(2, 20):
        images |= fresh.execute_stepwise(Tick(number)).images
    assert list(images) == ["alone"]
    assert fresh.execute_model(request("between")).shape == (32, 32, 3)


def test_a_new_manager_of_adapters_has_none_of_them_and_the_layers_are_the_models_own(fresh: DiffusionWorker) -> None:
    base = fresh.execute_model(request("base"))
    assert (wrapped(fresh), fresh.memory().adapter_slots_bytes) == (0, 0)
    fresh.add_lora(request=STRIPES, options=LoadOptions())
    styled = fresh.execute_model(STYLED)
    assert wrapped(fresh) > 0
    assert fresh.memory().adapter_slots_bytes > 0
    fresh.init_lora_manager()
    assert fresh.list_loras() == []
    assert (wrapped(fresh), fresh.memory().adapter_slots_bytes, fresh.memory().adapter_host_bytes) == (0, 0, 0)
    np.testing.assert_array_equal(fresh.execute_model(request("base")), base)
    fresh.add_lora(request=STRIPES, options=LoadOptions())
    np.testing.assert_array_equal(fresh.execute_model(STYLED), styled)


def test_no_other_manager_of_adapters_is_made_under_requests_or_asleep_and_none_without_a_pipeline(fresh: DiffusionWorker) -> None:
    fresh.execute_stepwise(Tick(1, [request("runs")]))
    with pytest.raises(RequestError, match="while requests run, found 1") as busy:
        fresh.init_lora_manager()
    fresh.execute_stepwise(Tick(2, leave=["runs"]))
    fresh.sleep()
    with pytest.raises(RequestError) as asleep:
        fresh.init_lora_manager()
    fresh.wake_up()
    assert (busy.value.code, asleep.value.code) == (ErrorCode.BUSY, ErrorCode.ASLEEP)
    empty = object.__new__(DiffusionWorker)
    empty.model_runner = DiffusionModelRunner(WorkerConfig(model="(none)", served_name="none"), torch.device("cpu"), OneRank())  # type: ignore[arg-type]
    empty.init_lora_manager()
    assert empty.model_runner.loras is None


def test_a_worker_gives_its_memory_back_and_has_it_again_tag_by_tag(fresh: DiffusionWorker) -> None:
    before, resident = fresh.execute_model(request("before")), fresh.resident_bytes()
    assert fresh.sleep() == resident > 0
    assert fresh.resident_bytes() == 0
    fresh.wake_up([MemoryTag.WEIGHTS])
    assert set(fresh.memory().asleep) == set(MemoryTag) - {MemoryTag.WEIGHTS}
    with pytest.raises(RequestError, match="freed by a sleep"):
        fresh.execute_model(request("before"))
    fresh.wake_up()
    np.testing.assert_array_equal(fresh.execute_model(request("before")), before)


def test_tasks_of_sleep_and_wake_are_acknowledged_with_the_bytes_they_freed(fresh: DiffusionWorker) -> None:
    resident = fresh.resident_bytes()
    slept = fresh.handle_sleep_task(task=SleepTask("night"))
    assert (slept.status, slept.rank, slept.freed_bytes) == (TaskStatus.SUCCESS, 0, resident)
    woken = fresh.handle_wake_task(task=WakeTask("night"))
    assert (woken.status, fresh.memory().asleep) == (TaskStatus.SUCCESS, [])


def test_a_worker_traces_between_start_and_stop_and_does_nothing_where_profiling_is_off(fresh: DiffusionWorker, tmp_path: Path) -> None:
    assert (fresh.profile(is_start=True), fresh.profile(is_start=False)) == (False, None)
    traced = object.__new__(DiffusionWorker)
    traced._profiler = RankProfiler(str(tmp_path), rank=2)
    assert traced.profile(is_start=True, prefix="steps") is True
    path = traced.profile(is_start=False)
    assert [str(found) for found in tmp_path.iterdir()] == [path]


@pytest.mark.slow
async def test_an_extension_makes_the_same_image_on_all_ranks_together() -> None:
    async with ranks(worker_extension="support.worker.extensions:Polite") as executor:
        first, second = results(await executor.call("make", timeout_s=60, prompt="a red digit seven"))
        other, _ = results(await executor.call("make", timeout_s=60, prompt="a blue digit two"))
    assert first == second != other


# --- the rank's process ---------------------------------------------------------------------------------------------------


class Idle:
    """A stand-in for a rank's worker that reports adapter 7 and no memory, and can do nothing else."""

    def list_loras(self) -> list[int]:
        return [7]

    def memory(self) -> None:
        return None


async def test_a_rank_takes_messages_in_order_and_answers_those_that_are_for_it() -> None:
    server = ServerEnd()
    said: list[Any] = []
    try:
        with RankEnd(server.endpoints) as wire:
            rank = WorkerProc(3, RankSender(lambda message, frames: said.append(message)), wire, Idle())  # type: ignore[arg-type]
            async with asyncio.timeout(60):
                await server.wait_for_ranks(1)
            server._broadcast.send(b"\xc1")
            for message in (Rpc(1, "list_loras", output_rank=0), Rpc(2, "list_loras"), Shutdown()):
                server.send(message)
            received = [rank.recv_message() for _ in range(3)]
            replies = [rank.execute_rpc(message) for message, _ in received[:2]]  # type: ignore[arg-type]
    finally:
        server.close()
    assert said == [Dropped(3, 1)]
    assert replies[0] is None and replies[1] is not None
    rank.return_result(replies[1])
    assert said[1:] == [RpcReply(2, 3, result=msgspec.msgpack.encode([7]))]
    assert isinstance(received[2][0], Shutdown)


# --- managers of adapters -------------------------------------------------------------------------------------------------


def created(*, slots: int = 2, cached: int = 3, targets: list[str] | None = None) -> DiffusionLoRAManager:
    config = WorkerConfig(
        model="(none)", served_name="none", max_loras=slots, max_cached_loras=cached, max_lora_rank=4, lora_target_modules=targets or []
    )
    modules = {"transformer": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "vae": nn.Linear(8, 8)}
    return create_lora_manager(config, modules, torch.device("cpu"), part_of=lambda name: None, in_use=tuple, convert=None)


def test_a_manager_is_created_with_the_slots_room_and_components_of_the_options() -> None:
    manager = created()
    assert (manager._copies.lora_slots, manager._copies.capacity, len(manager._copies)) == (2, 4, 0)
    assert list(manager._components) == ["transformer"]
    with pytest.raises(ConfigError, match="--max-cached-loras"):
        created(slots=3, cached=2)


def test_a_layer_that_is_registered_has_its_slots_before_the_first_adapter_and_computes_the_same() -> None:
    manager = created()
    model, x = manager._components["transformer"], torch.ones(1, 8)
    before = model(x)
    assert manager.register_module("transformer.0")
    assert not manager.register_module("transformer.0")
    assert [isinstance(layer, LoRALayer) for layer in model.children()] == [True, False, False]
    assert manager.layers.nbytes > 0
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("transformer.1", {}, "found ReLU"),
        ("transformer.9", {}, "found nothing"),
        ("transformer.2", {"targets": ["0"]}, "expected a layer that adapters may change, found Linear"),
        ("transformer.0", {"slots": 0, "cached": 0}, "adapters are off, --max-loras is 0"),
    ],
)
def test_what_may_have_no_adapters_is_not_registered(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        created(**options).register_module(name)


def test_a_dummy_adapter_is_computed_by_every_layer_with_slots_and_changes_nothing() -> None:
    manager = created()
    with pytest.raises(ValueError, match="found 0 such layers and rank 2"):
        manager._copies.create_dummy_lora(-1, 2)
    manager.register_module("transformer.0")
    manager.register_module("transformer.2")
    dummy = manager._copies.create_dummy_lora(-1, manager._copies.get_dummy_lora_warmup_rank(100))
    assert (dummy.adapter.rank, len(dummy.adapter.parts)) == (4, 2)
    manager._copies.add_adapter(dummy)
    manager._copies.activate_adapter(-1)
    model, x = manager._components["transformer"], torch.randn(2, 8)
    base = model(x)
    with torch.inference_mode(), manager._copies.set_adapter_mapping([{-1: 1.0}, {}]):
        assert [layer.named_by(1) for layer in model.children() if isinstance(layer, LoRALayer)] == [True, True]
        torch.testing.assert_close(model(x), base, rtol=0, atol=0)
