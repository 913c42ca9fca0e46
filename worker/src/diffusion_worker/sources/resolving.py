# SPDX-License-Identifier: Apache-2.0
"""What a kind of source answers when it is asked what there is: files at addresses, and what it calls this state of them."""

from pathlib import Path

import httpx2
import msgspec

from diffusion_worker.sources.downloading import RemoteFile
from diffusion_worker.sources.job import ArtifactKind


class ResolveContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind has to know beside the source itself."""

    client: httpx2.Client
    wanted: ArtifactKind
    # For messages.
    what: str
    secrets: Path
    allow_http: bool
    deadline_s: float


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Files by the names they are kept under; `folder` where they belong together, else there is one alone."""

    files: dict[str, RemoteFile]
    revision: str | None
    folder: bool
