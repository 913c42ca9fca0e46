# SPDX-License-Identifier: Apache-2.0
"""The requests that a `FakeRankGroup` knows, and their steps.

Real: its answers to ticks. Not real: the images, whose bytes follow from the request alone.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

from diffusion_worker import messages
from diffusion_worker.engine.state.rank_protocol import TickReport
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, RequestSpec, Tick, TickDone

DEFAULT_STEPS = 4
DEFAULT_SIZE = 64
# What every image is said to have taken.
FAKE_STAGES = messages.StageSeconds(encode=0.01, denoise=0.08, decode=0.02, post=0.005, peak_bytes=2_000_000)
# The reason why requests need the model alone, where `changing` says so.
CHANGE = "calls vae.enable_tiling()"
OUT_OF_MEMORY = ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "rank 0: out of memory")
NOT_LOADED = ErrorReport(ErrorCode.ADAPTER_NOT_LOADED, "rank 0: the adapter is not loaded")


class FakeRequests:
    """Requests that joined a generation of ranks, and the adapters that it holds. A test may add one or take one away."""

    def __init__(self) -> None:
        # Images of so many pixels and more are out of memory.
        self.out_of_memory_pixels: int | None = None
        # At which of its steps a request needs the model alone; and who joined, with whether it is made so.
        self.changing: int | None = None
        self.joined: list[tuple[str, bool]] = []
        # Adapters that requests used at once, at the most.
        self.most_active = 0
        self._forget()

    def _forget(self) -> None:
        """Nothing of an earlier generation is left."""
        self._frames: dict[str, list[bytes | memoryview]] = {}
        # Requests that the ranks know, by their ids, with the steps that are left.
        self.active: dict[str, tuple[RequestSpec, int]] = {}
        # The folders of the adapters that the ranks hold, by their ids.
        self.registered: dict[int, str] = {}
        self._prompts: Counter[str] = Counter()

    def _run(self, tick: Tick, frames: list[bytes | memoryview]) -> TickReport:
        for request_id in tick.leave:
            self.active.pop(request_id, None)
        for spec, count in zip(tick.join, tick.frames or [0] * len(tick.join), strict=True):
            self.joined.append((spec.request_id, spec.whole))
            self.active[spec.request_id] = (spec, spec.steps or DEFAULT_STEPS)
            self._frames[spec.request_id] = [frames.pop(0) for _ in range(count)]
        active = {use.lora_int_id for spec, _ in self.active.values() for use in spec.loras}
        self.most_active = max(self.most_active, len(active))
        self._prompts.update(spec.prompt for spec in tick.join)
        return self._advance(tick)

    def _advance(self, tick: Tick) -> TickReport:
        advancing = {name: at for name, at in self.active.items() if tick.advance is None or name in tick.advance}
        rows, known = len(advancing), len(self._prompts)
        prompts = messages.PromptCacheStats(known, 32, self._prompts.total() - known, known)
        done = TickDone(tick.number, [], [], rows, 1 if rows else 0, 0.001, 0.001, prompt_cache=prompts)
        frames: list[bytes | memoryview] = []
        for request_id, (spec, left) in advancing.items():
            self.active[request_id] = (spec, left - 1)
            step = (spec.steps or DEFAULT_STEPS) - left + 1
            if (error := self._error_of(spec)) is not None:
                done.failed.append(messages.Failed(request_id, error))
            elif self.changing == step and not spec.whole:
                done.replays.append(messages.Replay(request_id, CHANGE))
            else:
                self._step(spec, step, done, frames)
                if left > 1:
                    continue
            del self.active[request_id]
        return TickReport(done, frames)

    def _error_of(self, spec: RequestSpec) -> ErrorReport | None:
        if self.out_of_memory_pixels is not None and (spec.height or 0) * (spec.width or 0) >= self.out_of_memory_pixels:
            return OUT_OF_MEMORY
        return None if all(use.lora_int_id in self.registered for use in spec.loras) else NOT_LOADED

    def _step(self, spec: RequestSpec, step: int, done: TickDone, frames: list[bytes | memoryview]) -> None:
        """A request's step, its preview where one is due, and its image after the last one."""
        steps = spec.steps or DEFAULT_STEPS
        done.progress.append(messages.Progress(spec.request_id, step, steps))
        if step in (due := fake_preview_steps(spec)):
            number = due.index(step)
            done.previews.append(messages.Preview(spec.request_id, number, len(frames), fake_shape(spec)))
            frames.append(fake_preview(spec, number))
        if step == steps:
            done.finished.append(messages.Finished(spec.request_id, len(frames), fake_shape(spec), FAKE_STAGES))
            adapter = " + ".join(self.registered[use.lora_int_id] for use in spec.loras) or None
            frames.append(fake_pixels(spec, adapter, self._frames[spec.request_id]))


def fake_pixels(spec: RequestSpec, adapter_path: str | None = None, frames: Sequence[bytes | memoryview] = ()) -> bytes:
    """The image of a request and the frames of its images: the same for the same request, another for another."""
    lora = (adapter_path, [use.scale for use in spec.loras]) if spec.loras else None
    fields = (spec.prompt, spec.negative_prompt, spec.seed, spec.height, spec.width, spec.steps, spec.guidance_scale, lora)
    edit = (spec.task, spec.strength, spec.images, spec.mask, [hashlib.sha256(frame).digest() for frame in frames]) if frames else ()
    return _filled(spec, repr(fields + edit))


def fake_preview(spec: RequestSpec, number: int) -> bytes:
    """A preview of a request: every one of its previews and its image look different."""
    return _filled(spec, f"{number} {spec.seed}")


def _filled(spec: RequestSpec, text: str) -> bytes:
    """An image of the size of a request's that repeats the digest of a text."""
    pattern, size = hashlib.sha256(text.encode()).digest(), math.prod(fake_shape(spec))
    return (pattern * (size // len(pattern) + 1))[:size]


def fake_preview_steps(spec: RequestSpec) -> list[int]:
    """The steps after which the previews of a request are made: evenly spaced, none at the start or at the end."""
    steps = spec.steps or DEFAULT_STEPS
    wanted = (number * steps // (spec.previews + 1) for number in range(1, spec.previews + 1))
    return sorted({step for step in wanted if 0 < step < steps})


def fake_shape(spec: RequestSpec) -> tuple[int, int, int]:
    """Height, width and channels of the image of a request."""
    return spec.height or DEFAULT_SIZE, spec.width or DEFAULT_SIZE, 3
