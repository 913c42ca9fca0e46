# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters beside running steps, for P3: how long a put stops a step, and the memory that adapters take in all processes.

Real ranks, real loads. The server is this process, which sends one tick after the other. A stall is the longest step from the put to
the end of the first image with the adapter, less the longest of another window. There the same image is made with the adapter in its slot.
Cold is the first put of a worker, whose layers have no slots yet.
"""

import asyncio
import contextlib
import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import load_file, save_file

from diffusion_worker.config import Device, WorkerConfig
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.ranks.executor import RankExecutor

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
STRIPES = DIGITS / "loras" / "stripes" / "adapter_model.safetensors"
# Stripes is of rank 8 and 135 KB.
TIMES, SMALL_TIMES = 256, 8
DEADLINE_S = 600.0
STEPS = 4

T = TypeVar("T")


class StallSize(msgspec.Struct, frozen=True):
    """The size of a run: samples of each kind, the number of adapters whose memory is counted, and the numbers of ranks to measure with."""

    samples: int = 5
    adapters: int = 100
    ranks: tuple[int, ...] = (1, 2)


TINY = StallSize(samples=1, adapters=2, ranks=(1,))


def figures(*, tiny: bool = False) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Measure with real ranks; return the medians and the ratio of memory, and beside them every sample.

    Each stall is in milliseconds. `step_stall_ms` is the largest median; `host_bytes_ratio` is memory over the bytes of the files.
    """
    return asyncio.run(_figures(TINY if tiny else StallSize()))


async def _figures(size: StallSize) -> tuple[dict[str, float], list[dict[str, float]]]:
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        cold, warm, small = (
            _write(Path(folder) / name, times) for name, times in (("cold", TIMES), ("warm", TIMES), ("small", SMALL_TIMES))
        )
        # Bytes that are there already would need no copy.
        _change(warm, 1)
        for ranks in size.ranks:
            for _ in range(size.samples):
                async with _worker(ranks) as worker:
                    samples.append({f"stall_cold_{ranks}_ms": await worker.stall(cold, 1)})
                    samples.append({f"stall_warm_{ranks}_ms": await worker.stall(warm, 2)})
        kept = await _host_bytes(small, size.adapters)
    kinds = sorted({name for sample in samples for name in sample})
    found = {name: statistics.median(sample[name] for sample in samples if name in sample) for name in kinds}
    return {"step_stall_ms": max(found.values()), "host_bytes_ratio": kept} | found, samples


def _write(folder: Path, times: int) -> Path:
    """Make a folder with the digits' stripes adapter at `times` its rank, and return the folder.

    The factors are repeated side by side, and their product stays the same.
    """
    folder.mkdir()
    tensors = {
        name: (tensor.repeat(times, 1) if "lora_A" in name else tensor.repeat(1, times) / times).contiguous()
        for name, tensor in load_file(STRIPES).items()
    }
    save_file(tensors, _file(folder))
    return folder


class _Worker:
    """Real ranks that make one long image, and the loads and short images that run beside it.

    `longest_s` is the longest step since it was last set to 0.
    """

    def __init__(self, ranks: RankExecutor) -> None:
        self._ranks = ranks
        self._number = itertools.count()
        self.longest_s = 0.0

    async def tick(self, *join: RequestSpec) -> set[str]:
        """Take one step of all images after these requests joined, and return the ids of those that finished in it.

        Raises:
            RuntimeError: an image failed.
        """
        begun = time.perf_counter()
        self._ranks.broadcast_tick(Tick(next(self._number), list(join)))
        report = await self._ranks.next_report(DEADLINE_S)
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)
        if report.done.failed:
            raise RuntimeError(f"expected images, found {report.done.failed}")
        return {done.request_id for done in report.done.finished}

    async def while_stepping(self, work: Awaitable[T]) -> T:
        """Take steps until `work` is done, and return its result."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.tick()
        return await task

    async def load(self, path: Path, number: int) -> None:
        """Prepare an adapter and load it into the ranks, as the engine does.

        Raises:
            RuntimeError: a rank could not load it.
        """
        request: dict[str, object] = {"lora_name": path.name, "lora_int_id": number, "lora_path": str(path), "lora_root": None}
        prepared = await self._ranks.prepare_adapter(request, {}, timeout_s=DEADLINE_S)
        try:
            replies = await self._ranks.call("add_lora", timeout_s=DEADLINE_S, request=request, options={}, parts=prepared.parts)
        finally:
            prepared.close()
        if failed := [reply.error.message for reply in replies if reply.error is not None]:
            raise RuntimeError(f"expected an adapter, found {failed}")

    async def image(self, number: int) -> None:
        """Make a short image with the loaded adapter `number`, beside the long one, and return when it is finished."""
        name = f"styled-{next(self._number)}"
        done = await self.tick(_request(name, STEPS, [LoRAUse(number, 1.0)]))
        while name not in done:
            done = await self.tick()

    async def stall(self, path: Path, number: int) -> float:
        """Load an adapter and use it at once; return by how many milliseconds the longest step then exceeds that of a mere use.

        The use alone is measured right afterwards, for as long; the result may be negative.
        """
        begun, self.longest_s = time.perf_counter(), 0.0
        await self.while_stepping(self.load(path, number))
        await self.image(number)
        length_s, longest_s = time.perf_counter() - begun, self.longest_s
        begun, self.longest_s = time.perf_counter(), 0.0
        await self.image(number)
        while time.perf_counter() - begun < length_s:
            await self.tick()
        return (longest_s - self.longest_s) * 1000


@contextlib.asynccontextmanager
async def _worker(ranks: int, **options: Any) -> AsyncIterator[_Worker]:
    settings: dict[str, Any] = {"max_lora_rank": 8 * TIMES, "warmup_steps": 0, "device": Device.CPU} | options
    executor = RankExecutor(WorkerConfig(model=str(DIGITS / "model"), served_name="digits", ranks=ranks, **settings))
    await executor.start()
    try:
        worker = _Worker(executor)
        await worker.tick(_request("long", 100_000, []))
        for _ in range(20):
            await worker.tick()
        yield worker
    finally:
        await executor.stop()


def _request(name: str, steps: int, loras: list[LoRAUse]) -> RequestSpec:
    return RequestSpec(request_id=name, prompt="a red digit seven", seed=1, height=32, width=32, steps=steps, loras=loras)


async def _host_bytes(path: Path, adapters: int) -> float:
    """Return the memory that `adapters` loaded adapters take in all processes, over the bytes of their files.

    The file in `path` is changed before each load, so no two adapters are equal. Two loads before are not counted.
    """
    async with _worker(1, max_cached_loras=adapters + 3) as worker:
        for number in range(1, adapters + 3):
            if number == 3:
                before = _held_bytes()
            _change(path, number)
            await worker.load(path, number)
        return (_held_bytes() - before) / (adapters * _file(path).stat().st_size)


def _file(folder: Path) -> Path:
    return folder / "style.safetensors"


def _change(folder: Path, number: int) -> None:
    """Add a small constant that depends on `number` to one tensor of the adapter's file, so that its content differs."""
    tensors = load_file(_file(folder))
    first = min(tensors)
    tensors[first] = tensors[first] + torch.tensor(number / 4096)
    save_file(tensors, _file(folder))


def _held_bytes() -> int:
    """Return the private memory of this process and its descendants, plus that of shared adapters, counted once.

    A process that has ended meanwhile counts nothing.
    """
    pids = _family()
    shared = {}
    own = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            own += int(re.search(r"^Pss_Anon:\s+(\d+)", rollup, re.MULTILINE)[1]) * 1024  # type: ignore[index]
            for begin, end, inode in re.findall(
                r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+)\s+/memfd:adapter", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE
            ):
                shared[inode] = int(end, 16) - int(begin, 16)
    return own + sum(shared.values())


def _family() -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found
