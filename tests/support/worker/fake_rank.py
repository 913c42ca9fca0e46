# SPDX-License-Identifier: Apache-2.0
"""The state that a `FakeRankGroup` holds: the memory, adapters and faults of each rank, and the requests and steps of all ranks.

Real: the answers to ticks and tasks, as ranks send them. Not real: the memory, the adapters, and the images, whose bytes follow from the
request alone.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusion_worker import messages
from diffusion_worker.engine.state.rank_protocol import TickReport
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, MemoryTag, RequestSpec, SleepLevel, SleepTask, TaskAck, TaskStatus, Tick, TickDone

WEIGHTS_BYTES = 1_000_000
DEFAULT_STEPS = 4
DEFAULT_SIZE = 64
# The seconds and memory that are reported for every image.
FAKE_STAGES = messages.StageSeconds(encode=0.01, denoise=0.08, decode=0.02, post=0.005, peak_bytes=2_000_000)
# The reason for which requests need the model alone, where `changing` is set.
CHANGE = "calls vae.enable_tiling()"
OUT_OF_MEMORY = ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "rank 0: out of memory")
NOT_LOADED = ErrorReport(ErrorCode.ADAPTER_NOT_LOADED, "rank 0: the adapter is not loaded")


@dataclass
class FakeRank:
    """The memory of one rank, which a test may corrupt."""

    number: int
    asleep: list[MemoryTag] = field(default_factory=list)
    level: SleepLevel | None = None
    # The checksum of wrong weights, or of a wrong result for a fixed seed.
    checksum: str | None = None
    probe: str | None = None
    # Bytes of weights that stay resident in a sleep.
    leaked: int = 0
    # Faulty contents of adapters' copies in memory, by the adapters' ids.
    spoilt: dict[int, str] = field(default_factory=dict)
    # True: these faults outlast another load of the adapters.
    spoils_for_good: bool = False

    @property
    def resident(self) -> int:
        """The resident size of the weights: WEIGHTS_BYTES while awake, and what `leaked` says while asleep."""
        return self.leaked if MemoryTag.WEIGHTS in self.asleep else WEIGHTS_BYTES

    def load_adapter(self, lora_int_id: int) -> None:
        if not self.spoils_for_good:
            self.spoilt.pop(lora_int_id, None)

    def sleep(self, level: SleepLevel) -> int:
        """Release all memory, and return the bytes of weights released."""
        before = self.resident
        self.asleep, self.level = list(MemoryTag), level
        return before - self.resident

    def act(self, task: Any, error: ErrorReport | None) -> TaskAck:
        """Do a task of sleep or of waking, and acknowledge it. With `error` do nothing, and acknowledge with that error."""
        if error is not None:
            return TaskAck(task.task_id, TaskStatus.ERROR, self.number, 0, self.resident, error.code, error.message)
        freed = 0
        if isinstance(task, SleepTask):
            freed = self.sleep(task.level)
        else:
            self.asleep = [tag for tag in self.asleep if task.tags is not None and tag not in task.tags]
            self.level = self.level if self.asleep else None
        return TaskAck(task.task_id, TaskStatus.SUCCESS, self.number, freed, self.resident)

    def fingerprint(self, adapters: dict[int, str], weights: str, probe: str) -> messages.Fingerprint:
        """Return the fingerprint of these weights, this probe and the adapters in these folders, with the faults of this rank. The rank
        must be awake."""
        assert not self.asleep, "there is nothing to fingerprint on a rank that sleeps"
        kept = {lora_int_id: f"{fake_identity(path)} {self.spoilt.get(lora_int_id, 'kept')}" for lora_int_id, path in adapters.items()}
        return messages.Fingerprint(self.checksum or weights, kept, self.probe or probe)

    def memory(self) -> messages.MemoryReport:
        return messages.MemoryReport(WEIGHTS_BYTES, self.resident, WEIGHTS_BYTES, 0, ["1000-2000"], asleep=self.asleep, level=self.level)


class FakeRequests:
    """The requests of a generation of ranks, and its adapters. A test may add an adapter or remove one."""

    # Images of so many pixels or more run out of memory, or only beside others where `cramped` is set.
    out_of_memory_pixels: int | None = None
    cramped = False
    # The step at which a request needs the model alone.
    changing: int | None = None
    # The most adapters that requests used at once.
    most_active = 0

    def __init__(self) -> None:
        # The ids of requests that joined; True: it was made with the model alone.
        self.joined: list[tuple[str, bool]] = []
        self._forget()

    def _forget(self) -> None:
        """Forget the requests, adapters and prompts of the earlier generation; the list `joined` stays."""
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
        self.most_active = max(self.most_active, len({use.lora_int_id for spec, _ in self.active.values() for use in spec.loras}))
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
            large = self.out_of_memory_pixels is not None and (spec.height or 0) * (spec.width or 0) >= self.out_of_memory_pixels
            if large and (not self.cramped or len(self.active) > 1):
                done.failed.append(messages.Failed(request_id, OUT_OF_MEMORY))
            elif not self.registered.keys() >= {use.lora_int_id for use in spec.loras}:
                done.failed.append(messages.Failed(request_id, NOT_LOADED))
            elif self.changing == step and not spec.whole:
                done.replays.append(messages.Replay(request_id, CHANGE))
            else:
                self._step(spec, step, done, frames)
                if left > 1:
                    continue
            del self.active[request_id]
        return TickReport(done, frames)

    def _step(self, spec: RequestSpec, step: int, done: TickDone, frames: list[bytes | memoryview]) -> None:
        """Report a request's step, a preview where one is due, and the image after the last step."""
        steps = spec.steps or DEFAULT_STEPS
        done.progress.append(messages.Progress(spec.request_id, step, steps))
        # Previews are evenly spaced, without one at the start.
        due = sorted({number * steps // (spec.previews + 1) for number in range(1, spec.previews + 1)} - {0})
        if step in due:
            number = due.index(step)
            done.previews.append(messages.Preview(spec.request_id, number, len(frames), fake_shape(spec)))
            frames.append(fake_preview(spec, number))
        if step == steps:
            done.finished.append(messages.Finished(spec.request_id, len(frames), fake_shape(spec), FAKE_STAGES))
            adapter = " + ".join(self.registered[use.lora_int_id] for use in spec.loras) or None
            frames.append(fake_pixels(spec, adapter, self._frames[spec.request_id]))


def fake_digest(path: str) -> str:
    """Return `sha256:` and the hash of the path itself, which stands for the hash of the adapter's contents."""
    return "sha256:" + hashlib.sha256(path.encode()).hexdigest()


def fake_identity(path: str) -> messages.AdapterIdentity:
    """Return the identity of the adapter in the folder `path`, a hash of the path alone."""
    return messages.AdapterIdentity("v1:" + hashlib.sha256(path.encode()).hexdigest())


def fake_pixels(spec: RequestSpec, adapter_path: str | None = None, frames: Sequence[bytes | memoryview] = ()) -> bytes:
    """Return the pixels of a request's image, which depend on the request, the paths of its adapters and its image frames alone."""
    lora = (adapter_path, [use.scale for use in spec.loras]) if spec.loras else None
    fields = (spec.prompt, spec.negative_prompt, spec.seed, spec.height, spec.width, spec.steps, spec.guidance_scale, lora)
    edit = (spec.task, spec.strength, spec.images, spec.mask, [hashlib.sha256(frame).digest() for frame in frames]) if frames else ()
    return _filled(spec, repr(fields + edit))


def fake_preview(spec: RequestSpec, number: int) -> bytes:
    """Return the pixels of a preview. They depend on its number and the request's seed and size, and differ from the image's."""
    return _filled(spec, f"{number} {spec.seed}")


def _filled(spec: RequestSpec, text: str) -> bytes:
    """Return pixels of the request's size that repeat the digest of a text."""
    pattern, size = hashlib.sha256(text.encode()).digest(), math.prod(fake_shape(spec))
    return (pattern * (size // len(pattern) + 1))[:size]


def fake_shape(spec: RequestSpec) -> tuple[int, int, int]:
    return spec.height or DEFAULT_SIZE, spec.width or DEFAULT_SIZE, 3
