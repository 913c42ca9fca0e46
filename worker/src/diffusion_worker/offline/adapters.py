# SPDX-License-Identifier: Apache-2.0
"""Adapters of a script's calls, named or given as a `LoRARequest`, which is loaded under its name at its first use.

A name stands for one adapter at a time. Another path, or other bytes at the same path, is another adapter, which then takes the name. An
integer id means nothing here, because an adapter's identity is its content.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import NamedTuple

from diffusion_worker.cli import ADAPTER_NAME
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import MAX_LORA_SCALE
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterDocument, AdapterState
from diffusion_worker.errors import ConfigError, RequestError, refused
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.source import Source

AdapterArgument = str | LoRARequest | Sequence[str | LoRARequest] | None
Scales = float | Sequence[float] | None
# Files read from an adapter's folder.
READ = ("*.safetensors", "adapter_config.json")
# Among several files in a folder the ranks read the first of these.
WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")

# Names, inodes, sizes and times of files, which change when the files are written.
Fingerprint = tuple[tuple[str, int, int, int], ...]


class WantedAdapter(NamedTuple):
    """An adapter of one call; without a path it must have been loaded before."""

    name: str
    source: Source | None
    scale: float | None


def wanted_adapters(lora_request: AdapterArgument, lora_scale: Scales) -> list[WantedAdapter]:
    """Return the adapters of a call; an empty list if `lora_request` is None. No file is read.

    If `lora_scale` is a list, each adapter has its scale from it. Otherwise its scale is None: a single scale is checked here, and the
    engine applies it.

    Raises:
        RequestError: InvalidRequest that names the argument.
    """
    asked = list(lora_request) if isinstance(lora_request, list | tuple) else [] if lora_request is None else [lora_request]
    scales: list[float | None] = [None] * len(asked)
    if isinstance(lora_scale, Sequence):
        scales = list(lora_scale)
        if len(scales) != len(asked):
            raise refused("lora_scale", f"a number for each of the {len(asked)} adapters", f"{len(scales)} numbers")
    for scale in [*scales, *([] if isinstance(lora_scale, Sequence) else [lora_scale])]:
        if scale is not None and not (isinstance(scale, int | float) and abs(scale) <= MAX_LORA_SCALE):
            raise refused("lora_scale", f"a number from -{MAX_LORA_SCALE:g} to {MAX_LORA_SCALE:g}", repr(scale))
    return [_wanted(each, scale) for each, scale in zip(asked, scales, strict=True)]


def _wanted(asked: object, scale: float | None) -> WantedAdapter:
    if isinstance(asked, str):
        return WantedAdapter(asked, None, scale)
    if not isinstance(asked, LoRARequest):
        raise refused("lora_request", "the name of an adapter, a LoRARequest, or a list of them", type(asked).__name__)
    if not isinstance(asked.lora_name, str) or not ADAPTER_NAME.fullmatch(asked.lora_name):
        raise refused(
            "lora_request",
            "a lora_name of a-z, 0-9, '.', '_' and '-', first and last a letter or digit, at most 63 long",
            repr(asked.lora_name),
        )
    if not isinstance(asked.lora_path, str | PathLike):
        raise refused("lora_request", f"a path or source as lora_path of {asked.lora_name!r}", type(asked.lora_path).__name__)
    try:
        return WantedAdapter(asked.lora_name, parse_source(fspath(asked.lora_path)), scale)
    except ConfigError as error:
        raise refused("lora_request", "a lora_path that is a path or a source", str(error)) from None


class RequestedAdapters:
    """The sources of adapters that calls have loaded, by name, with fingerprints of their files, so that changes are noticed.

    It is not thread-safe.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Source, Fingerprint]] = {}

    async def load(self, engine: Engine, wanted: Sequence[WantedAdapter]) -> None:
        """Load the adapters that have a source, one after another; skip those that are still loaded from it, with unchanged files.

        Adapters without a source are not looked up. The first failure raises its RequestError, and the rest are not loaded.
        """
        for adapter in wanted:
            if adapter.source is not None:
                await self._load(engine, adapter.name, adapter.source)

    async def _load(self, engine: Engine, name: str, source: Source) -> None:
        found = await asyncio.to_thread(_fingerprint, source)
        there = _document(engine, name)
        digest = None
        if there is not None and there.source == source:
            if self._seen.get(name) == (source, found) and there.state is AdapterState.LOADED:
                return
            # The engine reuses the adapter of an equal source, unless it gets a digest to check.
            digest = await asyncio.to_thread(_digest, source)
        call = AdapterCall(operation_id=uuid.uuid4().hex, source=source, digest=digest, deadline_seconds=engine.config.lora_load_timeout_s)
        await engine.put_adapter(name, call)
        self._seen[name] = source, found


def _document(engine: Engine, name: str) -> AdapterDocument | None:
    """Return the document of the adapter with a name; None where a request could not use it."""
    try:
        return engine.model_document(name)
    except RequestError:
        return None


def _files(source: Source) -> list[Path]:
    """Return the files of an adapter at a path; none for a source of another kind, or where nothing is there."""
    if source.path is None:
        return []
    path = Path(source.path)
    return sorted(file for pattern in READ for file in path.glob(pattern)) if path.is_dir() else [path] if path.exists() else []


def _fingerprint(source: Source) -> Fingerprint:
    """Return the names, inodes, sizes and times of an adapter's files; nothing where they cannot be read, as the load reports that.

    It runs in a thread, because a network file system may hang.
    """
    try:
        stats = [(file.name, file.stat()) for file in _files(source)]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _digest(source: Source) -> str | None:
    """Return the SHA-256 of the weights file at a path, or None if it cannot be read. It runs in a thread."""
    files = [file for file in _files(source) if file.suffix == ".safetensors"]
    known = [file for name in WEIGHTS for file in files if file.name == name]
    try:
        weights = known[0] if known else next(iter(files))
        with weights.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except (OSError, StopIteration):
        return None
