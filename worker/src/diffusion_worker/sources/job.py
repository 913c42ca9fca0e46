# SPDX-License-Identifier: Apache-2.0
"""Messages between a server and its fetching process: JSON lines on standard input and output."""

import enum

import msgspec

from diffusion_worker.errors import ErrorCode
from diffusion_worker.sources.source import Source
from diffusion_worker.sources.transport_rules import Reach

GIB = 1 << 30


class ArtifactKind(enum.StrEnum):
    """The kind of artifact to fetch."""

    ADAPTER = "adapter"
    MODEL = "model"


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one fetch or check; `stall_s` is the longest time without any progress."""

    adapter_bytes: int = 16 * GIB
    model_bytes: int = 1024 * GIB
    stall_s: float = 60.0
    # Memory of its own, without files that it maps.
    memory_bytes: int = 2 * GIB


class FetchJob(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """A fetch to make, as JSON on the standard input of the fetching process. It names Secrets, whose values that process reads."""

    # The process that starts the fetch; the fetch ends with it.
    parent_pid: int
    source: Source
    wanted: ArtifactKind
    # An adapter's name, for messages.
    name: str
    # The required digest of an adapter's weights; a model with this digest may have another revision.
    digest: str | None
    # The required revision of a model's source; None is the current one.
    revision: str | None
    deadline_s: float
    cache_dir: str
    cache_bytes: int | None
    secrets_dir: str
    allow_http: bool
    # Set if the caller gave no control token: the addresses that the source names must be global.
    public_only: bool
    limits: FetchLimits

    @property
    def artifact(self) -> str:
        """The start of a message about this fetch: `adapter 'NAME'`, or just `model`."""
        return f"adapter {self.name!r}" if self.wanted is ArtifactKind.ADAPTER else "model"

    @property
    def reach(self) -> Reach:
        """The addresses that the fetch may connect to. A source that names only a repository or a bucket names no address."""
        names_address = self.source.http is not None or (self.source.s3 is not None and self.source.s3.endpoint is not None)
        if self.public_only and names_address:
            return Reach.GLOBAL
        return Reach.LOOPBACK if self.allow_http else Reach.PRIVATE

    @property
    def max_bytes(self) -> int:
        """The limit for the kind of artifact, on every file and, if all lengths are known, on their sum."""
        return self.limits.adapter_bytes if self.wanted is ArtifactKind.ADAPTER else self.limits.model_bytes


class CheckJob(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """An adapter in place whose file is checked before any rank reads it. With a `root` nothing outside that folder may be read."""

    parent_pid: int
    path: str
    root: str | None
    name: str
    # The required digest of the weights; None if any is right.
    digest: str | None
    deadline_s: float
    limits: FetchLimits

    @property
    def artifact(self) -> str:
        """The start of a message about this check."""
        return f"adapter {self.name!r}"


Job = FetchJob | CheckJob


class FetchProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The bytes received so far, and their total if known."""

    done: int
    total: int | None


class FetchDone(msgspec.Struct, frozen=True, tag="done"):
    """The result of a fetch: a path in the cache, and the digests (without `sha256:`) of the blobs it needs.

    `digest` is that of an adapter's weights or of a model's folder, as `sha256:<hex>`; `size_bytes` is the size of all blobs.
    """

    path: str
    digest: str
    revision: str | None
    size_bytes: int
    blobs: list[str]
    # A note for readers of the log.
    note: str | None = None


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """The result of a check: the digest of the weights as `sha256:<hex>`, if one was required."""

    digest: str | None


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The reason of a failed fetch or check."""

    code: ErrorCode
    message: str


Event = FetchProgress | FetchDone | Checked | FetchFailed
