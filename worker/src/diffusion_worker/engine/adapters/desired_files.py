# SPDX-License-Identifier: Apache-2.0
"""The adapters of the mounted folder: those that the main file lists, and those of the shards that it names.

The kubelet brings the files one by one. So a shard counts only when it has the sha256 that the main file names.
"""

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from diffusion_worker.engine.state.state_document import DesiredAdapter, DesiredShard, DesiredState


class ShardFile(msgspec.Struct, frozen=True):
    """The content of a shard."""

    adapters: list[DesiredAdapter]


class MountedAdapters(NamedTuple):
    """The adapters of all files that are as the main file names them."""

    named: dict[str, DesiredAdapter]
    # The reasons for files that are not, by file.
    missing: dict[str, str]


class DesiredFiles:
    """The reader of one server's mounted folder. A shard is read again only if the main file names another sha256."""

    def __init__(self, path: str | None) -> None:
        self._folder = Path(path).parent if path is not None else Path()
        self._read: dict[str, tuple[str, list[DesiredAdapter]]] = {}

    def read(self, main: DesiredState) -> MountedAdapters:
        """Return the adapters of the main file and its shards by name, in the order in which equally wanted ones are loaded.

        A shard that is not as named adds only to `missing`.
        """
        named = {adapter.name: adapter for adapter in main.adapters}
        missing: dict[str, str] = {}
        for shard in main.shards:
            try:
                named |= {adapter.name: adapter for adapter in self._shard(shard)}
            except ValueError as error:
                missing[shard.file] = str(error)
        return MountedAdapters(named, missing)

    def _shard(self, shard: DesiredShard) -> list[DesiredAdapter]:
        """Return the adapters of a shard; raise ValueError if its file cannot be read or has another sha256 than named."""
        sha256, adapters = self._read.get(shard.file, ("", []))
        if sha256 != shard.sha256:
            adapters = self._opened(shard)
            self._read[shard.file] = shard.sha256, adapters
        return adapters

    def _opened(self, shard: DesiredShard) -> list[DesiredAdapter]:
        path = self._folder / Path(shard.file).name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        found = hashlib.sha256(content).hexdigest()
        if found != shard.sha256:
            raise ValueError(f"{path}: expected the sha256 {shard.sha256[:16]}…, found {found[:16]}…")
        try:
            return msgspec.json.decode(gzip.decompress(content), type=ShardFile).adapters
        except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
