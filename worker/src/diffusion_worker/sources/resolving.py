# SPDX-License-Identifier: Apache-2.0
"""A source's answer about its content: files at addresses, and its name of this state."""

from pathlib import Path

import httpx2
import msgspec

from diffusion_worker.sources.downloading import RemoteFile
from diffusion_worker.sources.job import ArtifactKind
from diffusion_worker.sources.transport_rules import Reach


class ResolveContext(msgspec.Struct, frozen=True, kw_only=True):
    """Context that a kind needs beside the source itself."""

    client: httpx2.Client
    wanted: ArtifactKind
    # For messages.
    what: str
    secrets: Path
    allow_http: bool
    reach: Reach
    deadline_s: float


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Files by the names they are kept under; `folder` where they belong together, else there is one alone."""

    files: dict[str, RemoteFile]
    revision: str | None
    folder: bool
