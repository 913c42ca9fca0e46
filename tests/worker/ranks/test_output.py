# SPDX-License-Identifier: Apache-2.0
"""Finished images are copied, encoded and sent beside the next step; only later messages wait for them."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.messages import Fatal, Finished, Rpc, RpcReply, Shutdown, SleepTask, Tick, TickDone, pack
from diffusion_worker.ranks.finished_images import ImageReport
from diffusion_worker.ranks.output import RankSender
from diffusion_worker.ranks.worker_proc import WorkerProc
from diffusion_worker.runner.model_call.faults import RankFault
from diffusion_worker.runner.stepping.pixels import RawImage, bytes_of, to_pixels
from diffusion_worker.runner.stepping.stage_clock import StageClock
from diffusion_worker.runner.stepping.step_output import PreviewOutput, StepOutput

DEADLINE_S = 60.0


class SlowImage(RawImage):
    """An image whose pixels are there only once `ready` is set; with `error`, getting them then raises it.

    If `ready` is never set, the test fails at its deadline.
    """

    def __init__(self, ready: threading.Event, error: BaseException | None = None) -> None:
        super().__init__(np.ones((1, 4, 6, 3)))
        self._ready, self._error = ready, error

    def pixels(self) -> Any:
        if not self._ready.wait(DEADLINE_S):
            raise TimeoutError("nobody went on: everybody waits for this image")
        if self._error is not None:
            raise self._error
        return super().pixels()


class FakeWorker:
    """A rank's worker whose outputs a test gives by the number of the tick; it notes if it was put to sleep."""

    def __init__(self, ticks: dict[int, Callable[[], StepOutput]]) -> None:
        self._ticks = ticks
        self.slept = False

    def execute_stepwise(self, tick: Tick, frames: Any) -> StepOutput:
        return self._ticks.get(tick.number, StepOutput)()

    def handle_sleep_task(self, *, task: SleepTask) -> None:
        self.slept = True

    def memory(self) -> None:
        return None


class Wire:
    """A stand-in for a rank's wire: `receive` gives a test's messages one by one, and `send` keeps each with its thread."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)
        self.sent: list[tuple[Any, list[bytes]]] = []
        self.threads: list[threading.Thread] = []

    def receive(self, on_dropped: Any, on_idle: Any) -> Any:
        return self._messages.pop(0), []

    def send(self, message: Any, frames: Any = ()) -> None:
        self.sent.append((message, [bytes(frame) for frame in frames]))
        self.threads.append(threading.current_thread())

    @property
    def said(self) -> list[Any]:
        return [message for message, _ in self.sent]


def finished(name: str, image: RawImage) -> StepOutput:
    return StepOutput(images={name: image}, clocks={name: StageClock()})


def loop(wire: Wire, worker: FakeWorker, *, rank: int = 0) -> None:
    WorkerProc(rank, RankSender(wire.send), wire, worker).worker_busy_loop()  # type: ignore[arg-type]


def test_the_next_step_begins_while_a_large_image_is_on_its_way_and_reports_come_in_order() -> None:
    next_begun = threading.Event()

    def second() -> StepOutput:
        next_begun.set()
        return StepOutput()

    wire = Wire(Tick(1), Tick(2), Tick(3), Shutdown())
    loop(wire, FakeWorker({1: lambda: finished("a", SlowImage(next_begun)), 2: second}))
    assert [done.number for done in wire.said] == [1, 2, 3]
    assert wire.said[0].finished[0].request_id == "a"
    assert wire.sent[0][1] == [b"\xff" * (4 * 6 * 3)]


def test_a_tick_without_images_is_sent_by_the_thread_that_made_it() -> None:
    wire = Wire(Tick(1), Tick(2), Shutdown())
    loop(wire, FakeWorker({}))
    assert wire.threads == [threading.current_thread()] * 2


def test_sleep_is_answered_after_the_images_that_were_finished_before_it() -> None:
    asleep = threading.Event()

    class Sleeps(FakeWorker):
        def handle_sleep_task(self, *, task: SleepTask) -> None:
            asleep.set()

    wire = Wire(Tick(1), Rpc(7, "handle_sleep_task", pack(task=SleepTask("s"))), Shutdown())
    loop(wire, Sleeps({1: lambda: finished("a", SlowImage(asleep))}))
    assert [type(message) for message in wire.said] == [TickDone, RpcReply]
    assert (wire.said[0].finished[0].request_id, wire.said[1].error) == ("a", None)


def test_a_rank_says_that_it_is_quiet_when_its_device_is_and_every_image_before_is_sent() -> None:
    synchronized = threading.Event()

    class Device(FakeWorker):
        def synchronize(self) -> None:
            synchronized.set()

    wire = Wire(Tick(1), Rpc(7, "synchronize"), Shutdown())
    loop(wire, Device({1: lambda: finished("a", SlowImage(synchronized))}))
    assert [type(message) for message in wire.said] == [TickDone, RpcReply]
    assert (wire.said[0].finished[0].request_id, wire.said[1].error) == ("a", None)


def test_shutdown_waits_until_every_image_is_sent() -> None:
    ready = threading.Event()

    class Late(Wire):
        def receive(self, on_dropped: Any, on_idle: Any) -> Any:
            message, frames = super().receive(on_dropped, on_idle)
            if isinstance(message, Shutdown):
                threading.Timer(0.01, ready.set).start()
            return message, frames

    wire = Late(Tick(1), Tick(2), Shutdown())
    loop(wire, FakeWorker({1: lambda: finished("a", SlowImage(ready)), 2: lambda: finished("b", SlowImage(ready))}))
    assert [done.finished[0].request_id for done in wire.said] == ["a", "b"]


def test_a_rank_that_dies_sends_what_it_has_finished_before_its_last_words() -> None:
    dying = threading.Event()

    def dies() -> StepOutput:
        dying.set()
        raise RankFault(Fault.COLLECTIVE, "a peer is gone")

    wire = Wire(Tick(1), Tick(2))
    output = RankSender(wire.send)
    proc = WorkerProc(0, output, wire, FakeWorker({1: lambda: finished("a", SlowImage(dying)), 2: dies}))  # type: ignore[arg-type]
    with pytest.raises(RankFault):
        proc.worker_busy_loop()
    output.send_final(Fatal(0, "a peer is gone"))
    assert [type(message) for message in wire.said] == [TickDone, Fatal]


def test_an_image_of_no_numbers_is_the_error_of_its_own_request_and_the_others_of_the_tick_get_theirs() -> None:
    at_once = threading.Event()
    at_once.set()
    good, bad = SlowImage(at_once), RawImage(np.full((1, 2, 2, 3), np.nan))
    both = StepOutput(images={"bad": bad, "good": good}, clocks={"bad": StageClock(), "good": StageClock()})
    wire = Wire(Tick(1), Shutdown())
    loop(wire, FakeWorker({1: lambda: both}))
    (done,) = wire.said
    assert [(failed.request_id, failed.error.code) for failed in done.failed] == [("bad", ErrorCode.REQUEST_FAILED)]
    assert "not numbers" in done.failed[0].error.message
    assert [(item.request_id, item.frame) for item in done.finished] == [("good", 0)]


def test_a_device_that_is_lost_while_an_image_is_copied_ends_the_rank_also_when_nothing_comes() -> None:
    at_once = threading.Event()
    at_once.set()
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Idle(Wire):
        def receive(self, on_dropped: Any, on_idle: Any) -> Any:
            while not self._messages:
                on_idle()
            return super().receive(on_dropped, on_idle)

    wire = Idle(Tick(1))
    with pytest.raises(RankFault, match="illegal memory access"):
        loop(wire, FakeWorker({1: lambda: finished("a", SlowImage(at_once, lost))}))
    assert wire.sent == []


def test_only_the_rank_that_answers_makes_images_pixels() -> None:
    never = threading.Event()
    wire = Wire(Tick(1), Shutdown())
    loop(wire, FakeWorker({1: lambda: finished("a", SlowImage(never))}), rank=1)
    assert wire.sent == []


def test_making_pixels_counts_as_post_and_the_image_goes_with_what_its_stages_took() -> None:
    clock = StageClock()
    clock.peak_bytes = 5
    made, frames = ImageReport(TickDone(1), StepOutput(images={"a": RawImage(np.zeros((1, 64, 64, 3)))}, clocks={"a": clock})).make()
    assert isinstance(made, TickDone)
    (image,) = made.finished
    assert isinstance(image, Finished)
    assert (image.shape, len(frames[0]), image.stages.peak_bytes) == ((64, 64, 3), 64 * 64 * 3, 5)
    assert 0 < image.stages.post < 1
    assert msgspec.structs.replace(image.stages, post=0.0).denoise == 0


def test_a_gpu_would_make_the_same_bytes_as_a_cpu() -> None:
    values = torch.rand(1, 3, 40, 50, generator=torch.Generator().manual_seed(1)) * 1.2 - 0.1
    values[0, 0, 0, :8] = torch.arange(8) / 255 + 0.5 / 255
    for given in (values, values.to(torch.bfloat16), values.half()):
        made, finite = bytes_of(given[0])
        assert np.array_equal(made.numpy(), to_pixels(given))
        assert bool(finite)
    values[0, 1, 2, 3] = float("inf")
    assert not bool(bytes_of(values[0])[1])
    with pytest.raises(RequestError, match="not numbers"):
        to_pixels(values)


def test_a_preview_that_has_no_memory_is_left_out_and_the_rank_goes_on() -> None:
    class Full(RawImage):
        def pixels(self) -> Any:
            raise torch.OutOfMemoryError("out of memory")

    previews = [
        PreviewOutput("a", number, image) for number, image in enumerate((Full(np.ones((1, 4, 6, 3))), RawImage(np.ones((1, 4, 6, 3)))))
    ]
    made, frames = ImageReport(TickDone(1), StepOutput(previews=previews)).make()
    assert ([preview.number for preview in made.previews], len(frames)) == ([1], 1)
