# SPDX-License-Identifier: Apache-2.0
"""The result of resolving a source: its files at addresses, and its name for this state."""

from pathlib import Path

import httpx2
import msgspec

from diffusion_worker.sources.downloading import RemoteFile
from diffusion_worker.sources.job import ArtifactKind
from diffusion_worker.sources.transport_rules import Reach


class ResolveContext(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a fetch that resolving needs beside the source itself."""

    client: httpx2.Client
    wanted: ArtifactKind
    # The artifact's name in messages.
    artifact: str
    secrets: Path
    allow_http: bool
    reach: Reach
    deadline_s: float


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a source by local name, not downloaded yet; `folder` if they form a folder, else there is a single file.

    `revision` is the source's name for its present state, None if it has none.
    """

    files: dict[str, RemoteFile]
    revision: str | None
    folder: bool
