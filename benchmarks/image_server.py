# SPDX-License-Identifier: Apache-2.0
"""The worker's real server process over ranks that cost nothing: `python -m benchmarks.image_server serve …`, for P10.

Every image is one step, and is a file of rows of RGB bytes of the asked size from the folder that `BENCHMARK_IMAGES` names.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from diffusion_worker import cli
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.documents import RankDocument, RankState
from diffusion_worker.engine.rank_group import Loss, TickReport
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Finished, MemoryReport, ModelInfo, RpcReply, Tick, TickDone
from diffusion_worker.ranks import executor

FOLDER_VARIABLE = "BENCHMARK_IMAGES"


def image_name(number: int, size: int) -> str:
    """The file of a square image."""
    return f"{number}-{size}.rgb"


class ImagesForNothing:
    """A rank group without ranks; its images are those of the folder, by turns."""

    generation = 1
    loss: Loss | None = None
    dropped_frames = (0, 0)

    def __init__(self, config: WorkerConfig) -> None:
        self._files: dict[int, list[bytes]] = {}
        for path in sorted(Path(os.environ[FOLDER_VARIABLE]).glob("*.rgb")):
            self._files.setdefault(int(path.stem.partition("-")[2]), []).append(path.read_bytes())
        self._ticks: asyncio.Queue[Tick] = asyncio.Queue()
        self._made = 0
        self._released = asyncio.Event()
        self._released.set()

    async def start(self) -> ModelInfo:
        """At once. From now on SIGUSR1 holds all images back, and the next one hands them out."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._turn)
        return ModelInfo(pipeline="Benchmark", dtype="none", size_multiple=8, weights_bytes=0)

    def _turn(self) -> None:
        (self._released.clear if self._released.is_set() else self._released.set)()

    async def restart(self) -> ModelInfo:
        """Never called: nothing is lost here."""
        return await self.start()

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue it."""
        self._ticks.put_nowait(tick)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Whoever joins is finished."""
        tick = await self._ticks.get()
        await self._released.wait()
        frames: list[bytes | memoryview] = []
        finished = []
        for spec in tick.join:
            images = self._files[spec.height or 0]
            finished.append(Finished(spec.request_id, len(frames), (spec.height or 0, spec.width or 0, 3)))
            frames.append(images[self._made % len(images)])
            self._made += 1
        return TickReport(TickDone(tick.number, finished, rows=len(frames), calls=1, seconds=0.001), frames)

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """There is nothing to call."""
        raise RequestError(ErrorCode.RANK_FAILED, f"{method}: expected ranks, found a benchmark")

    async def failed(self) -> Loss:
        """Never."""
        future: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        return await future

    def documents(self) -> list[RankDocument]:
        """One rank in this process."""
        return [RankDocument(0, os.getpid(), RankState.READY, 0.0, MemoryReport(0, 0, 0, 0, []))]

    def load_progress(self) -> tuple[int, int]:
        """Done."""
        return 1, 1

    async def stop(self) -> None:
        """Nothing is to be ended."""


if __name__ == "__main__":
    executor.RankExecutor = ImagesForNothing  # type: ignore[assignment,misc]
    cli.main()
