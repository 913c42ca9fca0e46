# SPDX-License-Identifier: Apache-2.0
"""The order of work on the rehearsal's streams: it finds a value that is used before it is there."""

import torch

from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA


def test_a_value_of_another_stream_is_used_only_after_its_stream() -> None:
    with rehearse() as rehearsal:
        side = torch.cuda.Stream(CUDA)
        with torch.cuda.stream(side):
            made = torch.ones(3, device=CUDA)
        made + 1
        assert len(rehearsal.records.races) == 1 and "stream 0 reads" in rehearsal.records.races[0]
        assert "test_order.py" in rehearsal.records.races[0]
        rehearsal.records.clear()
        torch.cuda.current_stream().wait_stream(side)
        made + 1
        assert rehearsal.records.races == [] and not rehearsal.records.waits


def test_an_event_orders_two_streams_without_a_wait() -> None:
    with rehearse() as rehearsal:
        made = torch.ones(3, device=CUDA)
        done = torch.cuda.Event()
        done.record()
        late = made + 1
        side = torch.cuda.Stream(CUDA)
        side.wait_event(done)
        with torch.cuda.stream(side):
            made + 1
            assert rehearsal.records.races == []
            late + 1
        assert len(rehearsal.records.races) == 1 and not rehearsal.records.waits


def test_a_pinned_copy_is_read_by_the_host_only_once_it_was_waited_for() -> None:
    with rehearse() as rehearsal:
        made = torch.ones(3, device=CUDA)
        here = torch.empty(3, pin_memory=True).copy_(made, non_blocking=True)
        here.sum()
        assert len(rehearsal.records.races) == 1 and "the host reads" in rehearsal.records.races[0]
        rehearsal.records.clear()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert here.sum() == 3
        assert rehearsal.records.races == [] and rehearsal.records.waits.total() == 1


def test_pinned_memory_is_written_again_only_once_its_copy_is_done() -> None:
    with rehearse() as rehearsal:
        here = torch.ones(3).pin_memory()
        there = here.to(CUDA, non_blocking=True)
        here.zero_()
        assert len(rehearsal.records.races) == 1 and "the host writes to" in rehearsal.records.races[0]
        rehearsal.records.clear()
        there.sum().item()
        here.zero_()
        assert rehearsal.records.races == []


def test_memory_is_pinned_until_it_is_freed_and_so_are_its_parts() -> None:
    with rehearse():
        pinned, plain = torch.ones(6).pin_memory(), torch.ones(6)
        assert pinned.is_pinned() and pinned[2:].is_pinned() and pinned.view(2, 3).is_pinned()
        assert not plain.is_pinned() and not (pinned + 1).is_pinned() and not pinned.to(CUDA).is_pinned()
