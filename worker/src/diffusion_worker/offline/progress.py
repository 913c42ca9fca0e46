# SPDX-License-Identifier: Apache-2.0
"""Progress bars for people, on stderr. The engine's thread only records progress; the waiting thread draws it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.std import tqdm  # type: ignore[import-untyped]

from diffusion_worker.engine.state.request_events import RequestEvent, StepTaken

WEIGHTS_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{elapsed}]"


def wanted(progress: bool | None) -> bool:
    """Return whether to draw: the argument, or by default whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


class StepCounts:
    """The steps of one call's images. An image whose ranks were lost begins again, so counts may fall."""

    def __init__(self, images: int) -> None:
        self.images = images
        self._steps: dict[tuple[int, int], StepTaken] = {}

    def listener(self, prompt: int) -> Callable[[RequestEvent], None]:
        """Return a callback for the events of prompt number `prompt`. It keeps the latest step of each of that prompt's images."""

        def note(event: RequestEvent) -> None:
            if isinstance(event, StepTaken):
                self._steps[prompt, event.index] = event

        return note

    @property
    def taken(self) -> int:
        """The sum of the steps that the call's images have done; an image that begins again starts from 0."""
        return sum(event.step for event in list(self._steps.values()))

    @property
    def expected(self) -> int | None:
        """The steps of all images, if each takes as many as the longest that began; None while no number of steps is known."""
        most = max((event.steps or 0 for event in list(self._steps.values())), default=0)
        return most * self.images or None

    @property
    def finished(self) -> int:
        """The number of images that have no steps left."""
        return sum(1 for event in list(self._steps.values()) if event.step == event.steps)


@contextmanager
def step_bar(counts: StepCounts, progress: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar for a call until the end of the block, if `wanted(progress)`; yield the function that redraws it."""
    with tqdm(total=None, unit="step", disable=not wanted(progress)) as bar:

        def draw() -> None:
            bar.total, bar.n = counts.expected, counts.taken
            bar.set_description_str(f"{counts.finished}/{counts.images} images", refresh=True)

        yield draw
        draw()


@contextmanager
def load_bar(name: str, loaded: Callable[[], tuple[int, int]], progress: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar for the load of a model until the end of the block, if `wanted(progress)`; yield the function that redraws it.

    `loaded` returns the bytes done and in all, 0 in all if unknown.
    """
    with tqdm(total=None, desc=f"loading {name}", bar_format=WEIGHTS_FORMAT, unit_scale=True, disable=not wanted(progress)) as bar:

        def draw() -> None:
            bar.n, total = loaded()
            bar.total = total or None
            bar.refresh()

        yield draw
        draw()
