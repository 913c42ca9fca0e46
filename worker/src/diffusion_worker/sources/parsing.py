# SPDX-License-Identifier: Apache-2.0
"""Parsing of a source from one text: a path, a URI of its kind, or the JSON object that is used everywhere else. Pure."""

import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import msgspec

from diffusion_worker.errors import ConfigError
from diffusion_worker.sources.source import HttpSource, HuggingFaceSource, PvcSource, S3Source, Source

URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
FORMS = "a path, hf://org/name@revision, s3://bucket/key, pvc://claim/path, https://host/file#sha256=…, or a source as a JSON object"


def parse_source(text: str) -> Source:
    """Parse a source from a JSON object, a URI, or a path, which is any text without a scheme; raise ConfigError. Nothing is looked up."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=Source)
        except msgspec.DecodeError as error:
            raise ConfigError(f"expected a source as a JSON object: {error}") from None
    scheme = URI.match(text)
    if scheme is None:
        if not text:
            raise ConfigError(f"expected {FORMS}, found nothing")
        return Source(path=text)
    parse = KINDS.get(scheme[1].lower())
    if parse is None:
        raise ConfigError(f"expected {FORMS}, found the scheme {scheme[1]!r}")
    return parse(text)


def is_remote(source: Source) -> bool:
    """Return True for hubs, S3 and HTTP, whose files have to be downloaded; paths and claims are read in place."""
    return source.path is None and source.pvc is None


def _hub(text: str) -> Source:
    """Parse `hf://org/name@revision/path`: a path whose last part has a dot is an adapter's file, any other a folder."""
    rest = text.partition("://")[2]
    org, _, rest = rest.partition("/")
    repo, _, path = rest.partition("/")
    repo, _, revision = repo.partition("@")
    if not org or not repo or any(mark in text for mark in "?#"):
        raise ConfigError(f"expected hf://org/name@revision or hf://org/name@revision/file.safetensors, found {text!r}")
    path = path.strip("/")
    is_file = "." in path.rpartition("/")[2]
    found = HuggingFaceSource(
        f"{org}/{repo}",
        revision=revision or "main",
        file=path if path and is_file else None,
        subfolder=None if is_file or not path else path,
    )
    return Source(hugging_face=found)


def _s3(text: str) -> Source:
    parts = urlsplit(text)
    if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        expected = "s3://bucket/key, or s3://bucket/prefix/ for a folder"
        raise ConfigError(f"expected {expected}; to name an endpoint or a Secret, give the whole source as a JSON object instead")
    return Source(s3=S3Source(text))


def _pvc(text: str) -> Source:
    claim, _, path = text.partition("://")[2].partition("/")
    if not claim:
        raise ConfigError(f"expected pvc://claim/path, found {text!r}")
    return Source(pvc=PvcSource(claim, unquote(path).rstrip("/") or "."))


def _http(text: str) -> Source:
    url, _, fragment = text.partition("#")
    key, _, digest = fragment.partition("=")
    if key != "sha256" or not SHA256.fullmatch(digest):
        # Not the address itself: it may carry a signature.
        raise ConfigError("expected the digest of the file at the end of its address, #sha256= and 64 hexadecimal digits")
    return Source(http=HttpSource(url, digest.lower()))


KINDS: dict[str, Callable[[str], Source]] = {"hf": _hub, "s3": _s3, "pvc": _pvc, "https": _http, "http": _http}
