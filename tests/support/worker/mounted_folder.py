# SPDX-License-Identifier: Apache-2.0
"""A mounted folder with the main file and shards, as the kubelet brings it.

Real: the bytes of the files. Not real: the links of the kubelet.
"""

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.engine.state.state_document import DesiredAdapter, DesiredShard, DesiredState
from diffusion_worker.sources.source import Source


def wanted(name: str, **fields: Any) -> DesiredAdapter:
    return DesiredAdapter(name, Source(path=f"/{name}"), **fields)


class MountedFolder:
    """A folder with the main file and shards. The main file names each shard as written last, whether it is in the folder or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main = folder / "desired.json"
        self._shards: dict[str, bytes] = {}

    def shard(self, file: str, *adapters: DesiredAdapter, brought: bool = True) -> None:
        """Write a shard that the next main file names; with `brought` it is put into the folder too."""
        content = gzip.compress(msgspec.json.encode({"adapters": adapters}), mtime=0)
        self._shards[file] = content
        if brought:
            self.bring(file)

    def bring(self, file: str) -> None:
        """Put a written shard into the folder, as the kubelet does."""
        _replace(self.folder / file, self._shards[file])

    def write(self, *listed: DesiredAdapter, age_s: float = 0.0, **fields: Any) -> str:
        """Write the main file with these adapters in its list, dated `age_s` ago; return its path."""
        shards = [DesiredShard(file, hashlib.sha256(content).hexdigest()) for file, content in self._shards.items()]
        _replace(self.main, msgspec.json.encode(DesiredState(adapters=list(listed), shards=shards, **fields)))
        at_s = self.main.stat().st_mtime - age_s
        os.utime(self.main, (at_s, at_s))
        return str(self.main)


def _replace(path: Path, content: bytes) -> None:
    replacement = path.with_suffix(".new")
    replacement.write_bytes(content)
    replacement.rename(path)
