# SPDX-License-Identifier: Apache-2.0
"""What a server tells the process that fetches for it, and what that says back: JSON lines on its standard input and output."""

import enum

import msgspec

from diffusion_worker.errors import ErrorCode
from diffusion_worker.sources.source import Source

GIB = 1 << 30


class ArtifactKind(enum.StrEnum):
    """What is fetched."""

    ADAPTER = "adapter"
    MODEL = "model"


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one fetch; `stall_s` is how long a source may send nothing at all."""

    adapter_bytes: int = 16 * GIB
    model_bytes: int = 1024 * GIB
    stall_s: float = 60.0
    # Address space: a fetch was seen to map 0.2 GiB, and more where a library has a thread for each of many cores.
    memory_bytes: int = 2 * GIB


class FetchJob(msgspec.Struct, frozen=True, kw_only=True):
    """One fetch. It names secrets and holds none."""

    # The process ends with the one that started it.
    parent_pid: int
    source: Source
    wanted: ArtifactKind
    # Of an adapter, for messages.
    name: str
    # What the weights of an adapter must have; of a model, what may be another revision where it is the same bytes.
    digest: str | None
    # The state of a model's source that is wanted; None wants what is there now.
    revision: str | None
    deadline_s: float
    cache_dir: str
    cache_bytes: int | None
    secrets_dir: str
    allow_http: bool
    limits: FetchLimits

    @property
    def what(self) -> str:
        """The beginning of every message."""
        return f"adapter {self.name!r}" if self.wanted is ArtifactKind.ADAPTER else "model"

    @property
    def max_bytes(self) -> int:
        """The most that may be fetched."""
        return self.limits.adapter_bytes if self.wanted is ArtifactKind.ADAPTER else self.limits.model_bytes


class FetchProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes so far, and in all where that is known."""

    done: int
    total: int | None


class FetchDone(msgspec.Struct, frozen=True, tag="done"):
    """It is in the cache: a path there, and the blobs it needs, by their digests without `sha256:`."""

    path: str
    digest: str
    revision: str | None
    size_bytes: int
    blobs: list[str]
    # What somebody should know who reads the log.
    note: str | None = None


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Why it is not."""

    code: ErrorCode
    message: str


Event = FetchProgress | FetchDone | FetchFailed
