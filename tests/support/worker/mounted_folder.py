# SPDX-License-Identifier: Apache-2.0
"""A mounted folder with the desired file and the adapters' file, as the kubelet brings it.

Real: the bytes of the files. Not real: the links of the kubelet.
"""

import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.engine.adapters.desired_files import FILE
from diffusion_worker.engine.state.state_document import DesiredAdapter, DesiredState
from diffusion_worker.sources.source import Source


def wanted(name: str, **fields: Any) -> DesiredAdapter:
    return DesiredAdapter(name, Source(path=f"/{name}"), **fields)


def write_adapters(folder: Path, adapters: Iterable[Any]) -> None:
    """Write the adapters' file with these entries."""
    _replace(folder / FILE, gzip.compress(msgspec.json.encode({"adapters": list(adapters)}), mtime=0))


class MountedFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main = folder / "desired.json"
        self.adapters = folder / FILE

    def write(self, *adapters: DesiredAdapter, age_s: float = 0.0, **fields: Any) -> str:
        """Write both files, dated `age_s` ago; return the path of the desired file, which has `fields`."""
        write_adapters(self.folder, adapters)
        _replace(self.main, msgspec.json.encode(DesiredState(**fields)))
        at_s = self.main.stat().st_mtime - age_s
        os.utime(self.main, (at_s, at_s))
        return str(self.main)


def _replace(path: Path, content: bytes) -> None:
    replacement = path.with_suffix(".new")
    replacement.write_bytes(content)
    replacement.rename(path)
