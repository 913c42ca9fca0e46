# SPDX-License-Identifier: Apache-2.0
"""The worker's real server over ranks that cost nothing: `python -m benchmarks.stand_ins.image_server FOLDER SIZE`, for P10.

Every image is one step, and is a file of rows of RGB bytes of the asked size from the folder. It listens on free ports and says so.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.stand_ins.http_load import CLIENTS
from benchmarks.stand_ins.rank_group import StandInRanks
from diffusion_worker.config import RequestLimits, WorkerConfig
from diffusion_worker.engine.state.rank_protocol import RankGroup, TickReport
from diffusion_worker.messages import Finished, ModelInfo, Tick, TickDone
from diffusion_worker.server.serve import LOOPBACK, Listen, run

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"


def image_name(number: int, size: int) -> str:
    """Return the file name of image `number` with `size` pixels a side, such as `3-512.rgb`; the server reads the size from the name."""
    return f"{number}-{size}.rgb"


class ImagesForNothing(StandInRanks):
    """A rank group without ranks: each request is finished in its first tick, with an image of its height from the folder, by turns."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._files: dict[int, list[bytes]] = {}
        for path in sorted(folder.glob("*.rgb")):
            self._files.setdefault(int(path.stem.partition("-")[2]), []).append(path.read_bytes())
        self._ticks: asyncio.Queue[Tick] = asyncio.Queue()
        self._made = 0
        self._released = asyncio.Event()
        self._released.set()

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Be ready at once. From now on each SIGUSR1 changes between holding all images back and handing them out."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._turn)
        return await super().start(asleep=asleep)

    def _turn(self) -> None:
        (self._released.clear if self._released.is_set() else self._released.set)()

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue the tick for `next_report`; frames are ignored."""
        self._ticks.put_nowait(tick)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Report the oldest tick: all requests that joined in it are finished, each with an image.

        It waits for a tick, and while images are held back, however long: `timeout_s` is not kept, because the clients have a deadline.
        """
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


def main(folder: Path, size: int) -> int:
    """Serve images of at most `size` pixels a side until SIGTERM, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    limits = RequestLimits(max_pixels=size * size)
    config = WorkerConfig(model=str(DIGITS), served_name="digits", max_batch_size=CLIENTS, warmup_steps=0, limits=limits)

    def ranks() -> RankGroup:
        return ImagesForNothing(folder)

    return run(config, Listen(host=LOOPBACK, port=0, control_port=0), ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
