# SPDX-License-Identifier: Apache-2.0
"""Sources of kind http: one file at an address, with the digest that it must have."""

import re
from urllib.parse import urlsplit

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.downloading import RemoteFile
from diffusion_worker.sources.in_place import refuse_endings
from diffusion_worker.sources.job import ArtifactKind
from diffusion_worker.sources.resolving import ResolveContext, Resolved
from diffusion_worker.sources.selection import ADAPTER_WEIGHTS
from diffusion_worker.sources.source import HttpSource
from diffusion_worker.sources.transport_rules import require_scheme

SHA256 = re.compile(r"[0-9a-f]{64}")


def http_digest(source: HttpSource) -> str:
    """Normalize the required SHA-256 to 64 lower-case digits without `sha256:`; raise RequestError (InvalidRequest) for anything else."""
    digest = source.sha256.lower().removeprefix("sha256:")
    if not SHA256.fullmatch(digest):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"source.http.sha256: expected 64 hexadecimal digits, found {source.sha256[:80]!r}")
    return digest


def resolve_http(source: HttpSource, question: ResolveContext) -> Resolved:
    """Resolve a source to its file, from the address and digest alone. Raises RequestError (InvalidRequest, UnsupportedFormat)."""
    if question.wanted is ArtifactKind.MODEL:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"{question.artifact}: an http address is not supported for a model, because it gives one file and a model is a folder",
        )
    try:
        parts = urlsplit(source.url)
        has_host, has_user = bool(parts.hostname), parts.username is not None
    except ValueError:
        has_host, has_user = False, False
    if not has_host or has_user:
        raise RequestError(ErrorCode.INVALID_REQUEST, "source.http.url: expected https://host/path without a user's name")
    require_scheme(parts.scheme, allow_http=question.allow_http)
    # Without the query, which may be a signature.
    label = f"{question.artifact}: {parts.scheme}://{parts.netloc}{parts.path}"
    refuse_endings([parts.path], label)
    digest = http_digest(source)
    file = RemoteFile(url=source.url, label=label, identity=f"sha256:{digest}", sha256=digest)
    return Resolved(files={ADAPTER_WEIGHTS: file}, revision=None, folder=False)
