# SPDX-License-Identifier: Apache-2.0
"""Memory that a sleep gives back and a wake restores, on one rank: by level, by tag, with too little memory, from a start asleep."""

import ctypes
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.lora.slot_bank import ColumnRun, Segment, Widths
from diffusion_worker.memory import host_memory
from diffusion_worker.memory import weights as weights_module
from diffusion_worker.memory.component_weights import fill_again
from diffusion_worker.memory.device_memory import available_bytes
from diffusion_worker.memory.heap import freeze_gc, give_back_heap
from diffusion_worker.memory.host_mirror import LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, chunk_sizes, own_bytes, own_mirrors
from diffusion_worker.memory.slabs import DeviceSlab
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import LoRAUse, MemoryTag, SleepLevel, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from support.runner.rig import OneRank, RunnerRig, request
from support.worker.process import DIGITS
from support.worker.real_memory import make_big_model

CPU = torch.device("cpu")
MIB = 2**20
STRIPES = LoRARequest(lora_name="stripes", lora_int_id=1, lora_path=str(DIGITS / "loras" / "stripes"))
WITH_STRIPES: dict[str, Any] = {"loras": [LoRAUse(1, 1.0)]}


class Layer(nn.Module):
    """A module with four megabytes that a file holds, and a few bytes that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024), requires_grad=False)
        self.register_buffer("computed", torch.arange(5), persistent=False)


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    """Provide a module whose saved tensors are also in a file, which is synced to the disk."""
    torch.manual_seed(0)
    module = Layer()
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    os.sync()
    return module


def contents(module: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight.clone(), module.computed.clone()  # type: ignore[operator]


def assert_holds(module: Layer, before: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(module.weight, before[0])
    assert torch.equal(module.computed, before[1])  # type: ignore[arg-type]


def cached_bytes(path: Path) -> int:
    """Return how many bytes of a file the system keeps in memory, in whole pages."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    seen = torch.frombuffer(content, dtype=torch.uint8)
    pages = torch.zeros(-(-len(content) // mmap.PAGESIZE), dtype=torch.uint8)
    assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (seen.data_ptr(), len(content), pages.data_ptr()))) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop_pages(path: Path) -> None:
    """Drop a file's pages from memory; skip the test if most of them stay, as in a folder that is itself in memory."""
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path) > path.stat().st_size // 10:
        pytest.skip("the temporary folder is in memory: the system cannot drop the pages of its files")


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# Levels


@pytest.mark.parametrize(("level", "cached"), [(SleepLevel.HOST_MEMORY, 1.0), (SleepLevel.DISCARD, 0.1)])
def test_a_level_decides_what_the_system_keeps_of_the_weights_file(layer: Layer, tmp_path: Path, level: SleepLevel, cached: float) -> None:
    before, file = contents(layer), tmp_path / "model.safetensors"
    drop_pages(file)
    weights = ModelWeights(CPU)
    weights.place(layer, tmp_path)
    file.read_bytes()
    weights.release(level)
    share = cached_bytes(file) / file.stat().st_size
    assert share >= cached if level is SleepLevel.HOST_MEMORY else share <= cached
    assert weights.report().weights_resident_bytes == 0
    weights.restore()
    assert_holds(layer, before)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("level", list(SleepLevel))
def test_what_is_in_no_file_stays_at_every_level(layer: Layer, tmp_path: Path, level: SleepLevel, mirrored: bool) -> None:
    weights = ModelWeights(CPU, mirrored=mirrored)
    weights.place(layer, tmp_path)
    weights.replace(layer.weight, torch.full((1024, 1024), 3.5))
    before = contents(layer)
    for _ in range(2):
        weights.release(level)
        report = weights.report()
        assert report.weights_resident_bytes == 0
        assert report.mirror_memory_bytes >= report.weights_bytes
        assert report.mirror_file_bytes == 0
        weights.restore()
        assert_holds(layer, before)


def test_a_sleeping_model_can_be_put_into_a_deeper_sleep(layer: Layer, tmp_path: Path) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    weights.release(SleepLevel.HOST_MEMORY)
    weights.release(SleepLevel.DISCARD)
    assert weights.report().mirror_memory_bytes == layer.computed.nbytes  # type: ignore[operator]
    weights.release(SleepLevel.HOST_MEMORY)  # discarded weights are not there for this level
    assert weights.report().mirror_file_bytes == layer.weight.nbytes
    weights.restore()
    assert_holds(layer, before)


@pytest.mark.parametrize("level", list(SleepLevel))
def test_a_file_that_was_written_to_while_the_model_slept_is_an_error_and_nothing_is_half_awake(
    layer: Layer, tmp_path: Path, level: SleepLevel
) -> None:
    weights = ModelWeights(CPU)
    weights.place(layer, tmp_path)
    weights.release(level)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    with pytest.raises(ConfigError, match=r"model\.safetensors: was written to since it was opened"):
        weights.restore()
    assert weights.report().weights_resident_bytes == 0
    assert weights.missing_bytes > 4 * MIB


# The mirror of an accelerator, by the same code in memory of the CPU


def test_an_accelerator_gives_its_storage_back_and_a_file_that_changed_keeps_it_asleep(layer: Layer, tmp_path: Path) -> None:
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    weights.make_mirrors()
    storage = layer.weight.untyped_storage()
    report = weights.report()
    assert (report.mirror_file_bytes, report.mirror_memory_bytes) == (0, own_bytes([report.weights_resident_bytes]))
    weights.release()
    assert storage.nbytes() == weights.report().weights_resident_bytes == 0
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError):
        weights.restore()  # a changed file is an error even if nothing is read from it
    assert storage.nbytes() == 0


def test_a_wake_from_a_mirror_copies_every_chunk_to_its_place(layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    storage = layer.weight.untyped_storage()
    monkeypatch.setattr(weights_module, "fill_again", lambda placed: pytest.fail("files were read") if list(placed) else None)
    weights.release()
    weights.restore()
    assert_holds(layer, before)
    assert layer.weight.untyped_storage().data_ptr() == storage.data_ptr()


def test_a_model_that_never_slept_has_no_mirror_and_its_first_sleep_makes_one(layer: Layer, tmp_path: Path) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    awake = weights.report()
    assert (awake.mirror_file_bytes, awake.mirror_memory_bytes) == (layer.weight.nbytes, 0)
    assert weights.unmirrored == [awake.weights_resident_bytes]
    weights.release()
    assert weights.report().mirror_memory_bytes == own_bytes([awake.weights_resident_bytes])
    weights.restore()
    assert weights.unmirrored == []
    assert_holds(layer, before)


def test_a_discarded_mirror_is_made_again_by_the_next_sleep_and_not_by_the_wake(layer: Layer, tmp_path: Path) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    weights.make_mirrors()
    weights.release(SleepLevel.DISCARD)
    asleep = weights.report()
    assert (asleep.mirror_file_bytes, asleep.mirror_memory_bytes) == (layer.weight.nbytes, layer.computed.nbytes)  # type: ignore[operator]
    weights.restore()
    assert weights.report().mirror_memory_bytes == layer.computed.nbytes  # type: ignore[operator]
    assert_holds(layer, before)
    weights.release()
    assert weights.report().mirror_file_bytes == 0
    weights.restore()
    assert_holds(layer, before)


def test_without_room_for_a_mirror_a_sleep_is_refused_with_numbers_and_nothing_is_allocated(
    layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, tmp_path)
    awake = weights.report()
    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "available_host_bytes", lambda: MIB)
        patch.setattr(weights_module, "own_mirrors", lambda sizes, pinned: pytest.fail("memory was allocated"))
        with pytest.raises(
            RequestError, match=rf"a mirror of the weights in host memory needs {8 * MIB} bytes .* found {MIB} bytes free"
        ) as caught:
            weights.release()
    assert (caught.value.code, caught.value.details) == (
        ErrorCode.INSUFFICIENT_MEMORY,
        {"neededBytes": 8 * MIB, "foundBytes": MIB},
    )
    assert weights.report() == awake
    weights.release(SleepLevel.DISCARD)  # this needs no mirror
    weights.restore()
    assert_holds(layer, before)


@pytest.mark.parametrize("size", [1, LEAST_CHUNK_BYTES, LEAST_CHUNK_BYTES + 1, 3 * MOST_CHUNK_BYTES + 12345, 33_700_000_000])
def test_chunks_of_a_mirror_are_powers_of_two_and_waste_little(size: int) -> None:
    sizes = chunk_sizes(size)
    assert all(chunk & (chunk - 1) == 0 and LEAST_CHUNK_BYTES <= chunk <= MOST_CHUNK_BYTES for chunk in sizes)
    assert size <= sum(sizes) < size + LEAST_CHUNK_BYTES
    assert sizes == sorted(sizes, reverse=True)


def test_a_mirror_keeps_bytes_across_the_borders_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.memory.host_mirror.chunk_sizes", lambda size: [64, 32, 16, 8])
    [mirror], slab = own_mirrors([120], pinned=False), torch.arange(120, dtype=torch.uint8)
    mirror.take(slab)
    mirror.take(torch.full((40,), 200, dtype=torch.uint8), start=60)
    slab[60:100] = 200
    again, part = torch.zeros(120, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)
    mirror.give(again)
    mirror.read(part, start=58)
    assert torch.equal(again, slab)
    assert torch.equal(part, slab[58:108])


# Asleep from the start


@pytest.mark.parametrize("mirrored", [False, True])
def test_weights_that_are_placed_asleep_take_no_memory_before_the_wake(layer: Layer, tmp_path: Path, mirrored: bool) -> None:
    before = contents(layer)
    weights = ModelWeights(CPU, asleep=True, mirrored=mirrored)
    weights.place(layer, tmp_path)
    report = weights.report()
    assert (report.weights_resident_bytes, report.mirror_memory_bytes) == (0, layer.computed.nbytes)  # type: ignore[operator]
    assert report.weights_bytes == report.mirror_file_bytes + report.mirror_memory_bytes
    weights.restore()
    assert_holds(layer, before)
    for level in SleepLevel:
        weights.release(level)
        weights.restore()
        assert_holds(layer, before)


@pytest.mark.slow
def test_a_start_asleep_reads_no_weights_and_takes_no_memory_for_them(tmp_path: Path) -> None:
    folder = make_big_model(tmp_path / "big")
    os.sync()
    rig = RunnerRig(model=str(folder))
    expected = rig.run(request("one", steps=1))[0]["one"]
    config = rig.config
    del rig
    gc.collect()
    file = next((folder / "transformer").glob("*.safetensors"))
    drop_pages(file)
    runner = DiffusionModelRunner(config, CPU, OneRank())  # type: ignore[arg-type]
    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    before = status_bytes("VmRSS")
    model = runner.load_model(lambda done, total: None, asleep=True)
    assert status_bytes("VmHWM") - before < 0.3 * model.weights_bytes
    assert cached_bytes(file) < 0.3 * file.stat().st_size
    report = runner.memory()
    assert (report.weights_resident_bytes, report.asleep, report.level) == (0, list(MemoryTag), SleepLevel.DISCARD)
    runner.restore()
    asleep = RunnerRig.__new__(RunnerRig)
    asleep.runner, asleep.parallel, asleep.replays = runner, OneRank(), {}
    assert (asleep.run(request("one", steps=1))[0]["one"] == expected).all()


# Tags, on a runner


@pytest.fixture(scope="module")
def shared() -> Iterator[RunnerRig]:
    rig = RunnerRig(max_loras=2)
    freeze_gc()  # the heap is frozen as on a rank, so that a sleep need not look at all of it
    yield rig
    gc.unfreeze()


@pytest.fixture
def rig(shared: RunnerRig) -> Iterator[RunnerRig]:
    """Provide the runner of the digits model, which the module's tests share, with one adapter registered; wake it after the test."""
    shared.runner.add_lora(STRIPES, LoadOptions())
    yield shared
    shared.runner.restore()


def image(rig: RunnerRig, **fields: Any) -> bytes:
    images, errors = rig.run(request("one", steps=1, **fields))
    assert not errors, errors
    return images["one"].tobytes()


def test_each_tag_comes_back_by_itself_and_no_step_is_taken_before_the_last(rig: RunnerRig) -> None:
    plain = image(rig)
    rig.runner.release()
    left = list(MemoryTag)
    for tag in (MemoryTag.CACHES, MemoryTag.WEIGHTS, MemoryTag.ADAPTERS):
        _, errors = rig.run(request("one"))
        assert errors["one"].code == ErrorCode.ASLEEP
        assert all(name in errors["one"].message for name in left)
        resident = rig.runner.memory().weights_resident_bytes
        assert (resident == 0) is (MemoryTag.WEIGHTS in left)
        rig.runner.restore([tag])
        left.remove(tag)
        assert rig.runner.memory().asleep == left
    assert rig.runner.memory().level is None
    assert image(rig) == plain


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("warm-up", lambda runner: runner.warm_up()),
        ("pipeline", lambda runner: runner.re_init_pipeline("StableDiffusion3Pipeline")),
        ("weights", lambda runner: runner.load_weights([("transformer.proj_out.bias", torch.zeros(16))])),
        ("request", lambda runner: runner.execute_model(request("one"))),
    ],
)
def test_what_needs_the_model_is_refused_while_it_sleeps(rig: RunnerRig, what: str, call: Callable[[Any], object]) -> None:
    rig.runner.release()
    with pytest.raises(RequestError, match=f"{what}.*expected a model that is awake, found weights, adapters, caches freed") as caught:
        call(rig.runner)
    assert caught.value.code is ErrorCode.ASLEEP
    assert rig.runner.memory().weights_resident_bytes == 0


@pytest.mark.parametrize("level", list(SleepLevel))
def test_slots_of_adapters_are_given_back_and_an_adapter_does_the_same_afterwards(rig: RunnerRig, level: SleepLevel) -> None:
    plain, striped = image(rig), image(rig, **WITH_STRIPES)
    assert plain != striped
    awake = rig.runner.memory()
    assert awake.adapter_slots_resident_bytes > 0
    assert awake.adapter_host_bytes > 0
    rig.runner.release(level)
    asleep = rig.runner.memory()
    assert asleep.adapter_slots_resident_bytes == 0
    assert asleep.adapter_slots_bytes == awake.adapter_slots_bytes
    rig.runner.restore()
    assert rig.runner.loras is not None
    if level is SleepLevel.DISCARD:
        assert (asleep.adapter_host_bytes, rig.runner.loras.list_adapters()) == (0, [])
        rig.runner.add_lora(STRIPES, LoadOptions())
    else:
        assert asleep.adapter_host_bytes == awake.adapter_host_bytes
    assert (image(rig), image(rig, **WITH_STRIPES)) == (plain, striped)


def test_an_adapter_that_comes_while_the_model_sleeps_takes_no_slot_before_it_is_used(rig: RunnerRig) -> None:
    striped = image(rig, **WITH_STRIPES)
    rig.runner.release(SleepLevel.DISCARD)
    rig.runner.add_lora(STRIPES, LoadOptions())
    assert rig.runner.memory().adapter_slots_resident_bytes == 0
    rig.runner.restore()
    assert image(rig, **WITH_STRIPES) == striped


def test_caches_are_counted_and_go_with_the_sleep_and_their_counts_stay(rig: RunnerRig) -> None:
    rig.run(request("one", prompt="kumquatfen"))
    before = rig.runner.get_prompt_embed_cache_stats()
    assert before is not None and rig.runner.memory().cache_bytes > 0
    rig.runner.release()
    assert rig.runner.memory().cache_bytes == 0
    assert rig.runner.get_prompt_embed_cache_stats() == before | {"size": 0}


def test_requests_that_run_are_dropped_by_a_sleep_with_all_that_they_hold(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("running")]))
    rig.runner.release()
    rig.runner.restore()
    assert rig.run(request("running"))[1] == {}


@pytest.mark.parametrize("again", list(SleepLevel))
def test_a_sleep_of_the_sleeping_and_a_wake_of_the_awake_do_nothing(rig: RunnerRig, again: SleepLevel) -> None:
    plain = image(rig)
    rig.runner.restore()
    rig.runner.release()
    rig.runner.release(again)
    assert rig.runner.memory().level is again
    rig.runner.restore()
    rig.runner.restore()
    assert image(rig) == plain


# Slots of an accelerator


def test_slots_of_an_accelerator_that_are_made_asleep_have_no_memory_before_the_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.lora.slot_bank.make_slab", DeviceSlab)
    segment = Segment([Widths(8, 8)], slots=2, max_rank=4, dtype=torch.float32, device=CPU, released=True)
    a = segment.of(segment.columns[0].a)
    assert (a.shape, segment.slab.bytes.untyped_storage().nbytes()) == ((8, 8), 0)
    for _ in range(2):
        segment.restore()
        assert a.untyped_storage().data_ptr() == segment.slab.bytes.data_ptr()
        assert not a.any()
        segment.write(1, [ColumnRun(segment, segment.columns[0].a.start, torch.ones(4, 8), ())])
        assert torch.equal(a[4:], torch.ones(4, 8)) and not a[:4].any()
        segment.release()
        assert a.untyped_storage().nbytes() == 0


# Too little memory


def limited(folder: Path, *, limit: int, used: int, file_pages: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {file_pages}\nactive_file 0\n")
    return folder


def test_a_wake_with_too_little_memory_is_refused_before_anything_is_filled(
    rig: RunnerRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = image(rig)
    rig.runner.release()
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "CGROUP", limited(tmp_path, limit=100 * MIB, used=99 * MIB))
        with pytest.raises(RequestError, match=rf"waking needs \d+ bytes of memory a rank, found {MIB} bytes free on cpu") as caught:
            rig.runner.restore()
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.INSUFFICIENT_MEMORY, True)
        report = rig.runner.memory()
        assert (report.weights_resident_bytes, report.asleep, report.level) == (0, list(MemoryTag), SleepLevel.HOST_MEMORY)
    rig.runner.restore()
    assert image(rig) == plain


@pytest.mark.parametrize(
    ("level", "error"),
    [(SleepLevel.HOST_MEMORY, torch.OutOfMemoryError("out of memory")), (SleepLevel.DISCARD, MemoryError("no"))],
)
def test_memory_that_ends_in_the_middle_of_a_wake_leaves_everything_asleep(
    rig: RunnerRig, level: SleepLevel, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = image(rig)
    rig.runner.release(level)

    def fails(placed: Any) -> None:
        fill_again(placed)
        raise type(error)(*error.args)  # a new error: the parameter itself stays, and would keep its frames

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "fill_again", fails)
        with pytest.raises(RequestError) as caught:
            rig.runner.restore()
    assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
    report = rig.runner.memory()
    assert (report.weights_resident_bytes, report.asleep, report.level) == (0, list(MemoryTag), level)
    rig.runner.restore()
    assert image(rig) == plain


def test_pages_of_files_do_not_count_as_used_memory(tmp_path: Path) -> None:
    assert available_bytes(CPU, cgroup=limited(tmp_path, limit=100 * MIB, used=80 * MIB)) == 20 * MIB
    assert available_bytes(CPU, cgroup=limited(tmp_path, limit=100 * MIB, used=80 * MIB, file_pages=50 * MIB)) == 70 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(CPU, cgroup=tmp_path) > 100 * MIB


# The heap


def test_freed_memory_goes_back_to_the_system() -> None:
    blocks = [bytearray(64 << 10) for _ in range(1600)]
    circle: list[Any] = [blocks[:-1]]
    circle.append(circle)
    last = blocks.pop()  # it is the last on the heap, so the heap cannot shrink from its end
    blocks.clear()
    full = status_bytes("VmRSS")
    del circle
    give_back_heap(CPU)
    assert full - status_bytes("VmRSS") > 80 * MIB
    assert len(last)


@pytest.mark.slow
def test_a_pipeline_that_is_given_up_goes_though_the_heap_was_settled(rig: RunnerRig) -> None:
    freeze_gc()
    rig.parallel.calls.clear()  # the recorded calls of earlier tests refer to the model
    before = weakref.ref(rig.runner.pipeline.transformer)
    rig.runner.re_init_pipeline("StableDiffusion3Pipeline")
    assert before() is None
