# SPDX-License-Identifier: Apache-2.0
"""Messages of the broadcast at a rank, and those of the ranks at the server, in one process."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffusion_worker.engine.state.rank_calls import all_true, require_success
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, RequestError
from diffusion_worker.messages import (
    Dropped,
    ErrorReport,
    MemoryReport,
    RequestSpec,
    Rpc,
    RpcReply,
    Shutdown,
    Tick,
    TickDone,
    decode_to_rank,
    decode_to_server,
    encode,
    pack,
)
from diffusion_worker.ranks.broadcast import RankEnd, ServerEnd
from diffusion_worker.ranks.extension import extended_worker
from diffusion_worker.ranks.output import RankSender
from diffusion_worker.ranks.worker_proc import WorkerProc
from diffusion_worker.runner.diffusion_worker import DiffusionWorker
from diffusion_worker.runner.model_call.faults import RankFault, classify, require_usable_rank
from diffusion_worker.runner.profiler import RankProfiler
from diffusion_worker.runner.stepping.step_output import StepOutput


class FakeWorker:
    """A rank's worker without a device, which reports adapters 1 and 2; a test sets the error that it raises."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.freed = 0
        self.ticks: list[int] = []

    def list_loras(self) -> list[int]:
        if self.raises is not None:
            raise self.raises
        return [1, 2]

    def greet(self, **kwargs: Any) -> Any:
        return kwargs

    def memory(self) -> MemoryReport:
        return MemoryReport(1, 1)

    def free_memory(self) -> None:
        self.freed += 1

    def execute_stepwise(self, tick: Tick, frames: Any = ()) -> StepOutput:
        self.ticks.append(tick.number)
        return StepOutput()


class FakeWire:
    """A stand-in for a rank's wire: `receive` gives a test's messages one by one, and `send` keeps the answers."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.sent: list[Any] = []

    def receive(self, on_dropped: Any, on_idle: Any) -> Any:
        return self.messages.pop(0), []

    def send(self, message: Any, frames: Any = None) -> None:
        self.sent.append(message)


def proc(*messages: Any, rank: int = 0) -> WorkerProc:
    wire: Any = FakeWire(*messages)
    return WorkerProc(rank, RankSender(wire.send), wire, FakeWorker(), frozenset({"greet"}))  # type: ignore[arg-type]


def worker_of(of: WorkerProc) -> Any:
    return of.worker


# Ranks that run a call, and those that answer with a result


@pytest.mark.parametrize(
    ("output_rank", "exec_all_ranks", "runs", "result"),
    [
        (None, False, [0, 1], [0, 1]),
        (None, True, [0, 1], [0, 1]),
        (1, False, [1], [1]),
        (1, True, [0, 1], [1]),
    ],
)
def test_a_call_runs_on_all_ranks_or_one_and_only_the_output_rank_sends_its_result(
    output_rank: int | None, exec_all_ranks: bool, runs: list[int], result: list[int]
) -> None:
    rpc = Rpc(1, "list_loras", {}, output_rank, exec_all_ranks)
    replies = [proc(rank=rank).execute_rpc(rpc) for rank in (0, 1)]
    assert [rank for rank, reply in enumerate(replies) if reply is not None] == runs
    assert [rank for rank, reply in enumerate(replies) if reply is not None and reply.result is not None] == result


def test_an_error_of_a_call_is_answered_and_the_loop_goes_on() -> None:
    rank = proc(Rpc(1, "list_loras"), Rpc(2, "list_loras"), Tick(5), Shutdown())
    worker_of(rank).raises = ValueError("no")
    rank.worker_busy_loop()
    first, second, done = rank._wire.sent  # type: ignore[attr-defined]
    assert [first.error, second.error] == [ErrorReport(ErrorCode.RANK_FAILED, "ValueError: no")] * 2
    assert (done.number, worker_of(rank).ticks) == (5, [5])


@pytest.mark.parametrize(
    ("rpc", "says"),
    [
        (Rpc(1, "nonsense"), "nonsense: the ranks' worker has no such method"),
        (Rpc(1, "execute_stepwise"), "execute_stepwise: the ranks' worker has no such method"),
        (Rpc(1, "__init__"), "__init__: the ranks' worker has no such method"),
        (Rpc(1, "list_loras", pack(of="me")), "list_loras: expected only arguments that it has, found of"),
        (Rpc(1, "remove_lora", pack(lora_int_id="one")), "remove_lora: Expected `int`"),
        (Rpc(1, "remove_lora", {"lora_int_id": msgspec.Raw(b"\xc1")}), "remove_lora: "),
    ],
)
def test_a_call_of_what_is_no_method_or_with_wrong_arguments_is_refused(rpc: Rpc, says: str) -> None:
    reply = proc().execute_rpc(rpc)
    assert reply is not None and reply.error is not None
    assert (reply.error.code, reply.error.message[: len(says)]) == (ErrorCode.INVALID_REQUEST, says)


def test_out_of_memory_in_a_call_gives_the_memory_back_and_the_rank_serves_on() -> None:
    rank = proc()
    worker_of(rank).raises = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    reply = rank.execute_rpc(Rpc(1, "list_loras"))
    assert reply is not None and reply.error is not None
    assert (reply.error.code, worker_of(rank).freed) == (ErrorCode.INSUFFICIENT_MEMORY, 1)


def test_a_device_that_is_lost_ends_the_rank_from_within_a_call() -> None:
    rank = proc(Rpc(1, "list_loras"), Shutdown())
    worker_of(rank).raises = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RankFault) as ended:
        rank.worker_busy_loop()
    assert ended.value.fault is Fault.DEVICE


def test_methods_of_an_extension_take_any_plain_data() -> None:
    reply = proc().execute_rpc(Rpc(1, "greet", pack(name="a", values=[1, 2.5, None])))
    assert reply is not None and reply.result is not None
    assert msgspec.msgpack.decode(reply.result) == {"name": "a", "values": [1, 2.5, None]}


# The choice of an answer among those of all ranks


def replies(*errors: str | None) -> list[RpcReply]:
    return [
        RpcReply(1, rank, None if error else msgspec.msgpack.encode(True), ErrorReport(ErrorCode.RANK_FAILED, error) if error else None)
        for rank, error in enumerate(errors)
    ]


def test_every_rank_that_failed_is_named() -> None:
    with pytest.raises(RequestError, match=r"sleep: rank 1: no; rank 2: never") as failed:
        require_success("sleep", replies(None, "no", "never"))
    assert (failed.value.code, failed.value.details) == (ErrorCode.RANK_FAILED, {"ranks": [1, 2]})


def test_the_same_complaint_of_all_ranks_is_told_once() -> None:
    with pytest.raises(RequestError) as failed:
        require_success("add_lora", replies("no such folder", "no such folder"))
    assert failed.value.message == "no such folder"


def test_results_of_yes_and_no_are_true_only_where_all_ranks_say_so() -> None:
    no = RpcReply(1, 1, msgspec.msgpack.encode(False))
    assert all_true(replies(None, None))
    assert not all_true([*replies(None), no])


# Kinds of faults


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("height: expected a multiple of 8"), Fault.REQUEST),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), Fault.REQUEST),
        (ValueError("a prompt about a CUDA error and the illegal memory access"), Fault.REQUEST),
        (MemoryError(), Fault.OUT_OF_MEMORY),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20 GiB"), Fault.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"), Fault.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Fault.DEVICE),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), Fault.DEVICE),
        (RuntimeError("CUDA error: device-side assert triggered"), Fault.DEVICE),
        (type("AcceleratorError", (RuntimeError,), {})("unknown"), Fault.DEVICE),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
            Fault.COLLECTIVE,
        ),
        (type("DistBackendError", (RuntimeError,), {})("NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled"), Fault.COLLECTIVE),
        (type("DistNetworkError", (RuntimeError,), {})("the client socket has timed out"), Fault.COLLECTIVE),
        (RankFault(Fault.COLLECTIVE, "x"), Fault.COLLECTIVE),
    ],
)
def test_an_error_is_one_requests_or_the_whole_groups(error: BaseException, fault: Fault) -> None:
    assert classify(error) is fault
    if fault in (Fault.DEVICE, Fault.COLLECTIVE):
        with pytest.raises(RankFault):
            require_usable_rank(error)
    else:
        require_usable_rank(error)


def test_an_error_is_known_by_what_it_was_raised_from() -> None:
    outer = ValueError("a step failed")
    outer.__cause__ = RuntimeError("CUDA error: misaligned address")
    assert classify(outer) is Fault.DEVICE


# Frames that are no message


@pytest.mark.parametrize("decode", [decode_to_rank, decode_to_server])
@given(frame=st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_decode_error(decode: Any, frame: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        decode(frame)


TICK = encode(Tick(3, [RequestSpec(request_id="a", prompt="p kumquatfen", seed=1)], ["b"], ["a"]))


@given(cut=st.integers(0, len(TICK) - 1), at=st.integers(0, len(TICK) - 1), byte=st.integers(0, 255))
@settings(max_examples=300)
def test_a_message_that_is_cut_or_changed_is_a_message_or_a_decode_error(cut: int, at: int, byte: int) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_rank(TICK[:cut])
    _decodes(TICK[:at] + bytes([byte]) + TICK[at + 1 :])


def test_a_message_nested_without_end_is_no_message() -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decode_to_rank(b"\x82\xa4type\xa3rpc\xa6kwargs" + b"\x91" * 100_000)


@pytest.fixture
def broadcaster(tmp_path: Path) -> Iterator[tuple[Any, RankEnd]]:
    """Provide a socket that can send any frames to ranks, and a rank's end of the wire that listens to it."""
    from diffusion_worker.ranks.broadcast import Endpoints

    endpoints = Endpoints(f"ipc://{tmp_path}/broadcast", f"ipc://{tmp_path}/answers")
    context = zmq.Context()
    sender = context.socket(zmq.XPUB)
    sender.bind(endpoints.broadcast)
    with RankEnd(endpoints) as rank:
        sender.recv()
        yield sender, rank
        rank._context.destroy(linger=0)
    context.destroy(linger=0)


@given(frames=st.lists(st.binary(max_size=40), max_size=5))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rank_drops_what_is_no_message_and_acts_on_the_next_one(broadcaster: tuple[Any, RankEnd], frames: list[bytes]) -> None:
    sender, rank = broadcaster
    before, told = rank.dropped, []
    junk = [frame for frame in [b"", b"\xc1", TICK[:-1], *frames] if not _decodes(frame)]
    for frame in junk:
        sender.send(frame)
    sender.send_multipart([TICK, TICK])
    sender.send(TICK)
    assert rank.receive(told.append) == (decode_to_rank(TICK), [])
    assert rank.dropped - before == len(junk) + 1
    assert told == list(range(before + 1, rank.dropped + 1))


def _decodes(frame: bytes) -> bool:
    try:
        decode_to_rank(frame)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


async def test_the_server_drops_what_is_no_message_and_reads_the_next_one() -> None:
    server = ServerEnd()
    context = zmq.Context()
    try:
        sender = context.socket(zmq.PUSH)
        sender.connect(server.endpoints.answers)
        for frame in (b"", b"\xc1", encode(Shutdown()), encode(TickDone(1))[:-1]):
            sender.send(frame)
        sender.send(encode(Dropped(1, 4)))
        async with asyncio.timeout(30):
            message, frames = await server.receive()
        assert (message, frames, server.dropped) == (Dropped(1, 4), [], 4)
    finally:
        context.destroy(linger=0)
        server.close()
    assert not server.folder.exists()


async def test_nothing_of_the_wire_can_be_found_once_all_ranks_are_connected() -> None:
    server = ServerEnd()
    try:
        with RankEnd(server.endpoints) as rank:
            async with asyncio.timeout(30):
                await server.wait_for_ranks(1)
                rank.send(Dropped(0, 1))
                await server.receive()
            server.hide()
            assert not server.folder.exists()
            server.send(Tick(7))
            assert await asyncio.to_thread(rank.receive, lambda count: None) == (Tick(7), [])
            rank.send(TickDone(7))
            async with asyncio.timeout(30):
                assert (await server.receive())[0] == TickDone(7)
    finally:
        server.close()


async def test_a_folder_of_a_killed_server_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    old, young = short_path / "diffusion-worker-old", short_path / "diffusion-worker-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "lock").touch()
    living = ServerEnd()
    for folder in (old, living.folder):
        os.utime(folder, (0, 0))
    other = ServerEnd()
    try:
        assert entries(short_path) == sorted([young, living.folder, other.folder])
    finally:
        living.close()
        other.close()
    assert entries(short_path) == [young]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# The worker's extension


class Polite:
    """An extension of the worker with a public method and a private one."""

    def greet(self, name: str) -> str:
        return f"hello {name}"

    def _private(self) -> None: ...


class Sleepless:
    """An extension with a method that would hide one of the worker's own."""

    def sleep(self) -> None: ...


class Undecided:
    value = 5


def test_an_extension_is_mixed_into_the_worker_and_its_public_methods_can_be_called() -> None:
    mixed, methods = extended_worker(f"{__name__}:Polite")
    assert issubclass(mixed, DiffusionWorker) and methods == {"greet"}
    assert mixed.greet(mixed.__new__(mixed), "a") == "hello a"  # type: ignore[attr-defined]
    assert extended_worker(None) == (DiffusionWorker, frozenset())


def test_an_extension_that_hides_a_method_of_the_worker_wins_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mixed, _ = extended_worker(f"{__name__}:Sleepless")
    assert mixed.sleep is Sleepless.sleep  # type: ignore[comparison-overlap]
    assert "replaces attributes of the worker's own class: sleep" in caplog.text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing.there:Class", "cannot be imported"),
        ("json:NoSuchClass", "cannot be imported"),
        ("json:dumps", "expected a class, found function"),
        ("json", "expected MODULE:CLASS"),
    ],
)
def test_an_extension_that_is_none_is_a_configuration_error(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        extended_worker(path)


# Profiles


def test_a_profile_is_one_file_whose_name_carries_prefix_and_rank(tmp_path: Path) -> None:
    profiler = RankProfiler(str(tmp_path), rank=3)
    assert profiler.start("warm up/1") is True
    assert profiler.start("again") is False
    path = profiler.stop()
    assert path is not None and Path(path).name.startswith("warm_up_1-rank3-")
    assert [str(found) for found in tmp_path.iterdir()] == [path]
    assert profiler.stop() is None
    gc.collect()


def test_a_profile_without_a_folder_is_nothing() -> None:
    profiler = RankProfiler(None, rank=0)
    assert (profiler.start("a"), profiler.stop()) == (False, None)
