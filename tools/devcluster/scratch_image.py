# SPDX-License-Identifier: Apache-2.0
"""An image of one static program and nothing else, written as the archive that `docker save` writes; no image builder needed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path


def write(program: Path, *, reference: str, user: str, target: Path) -> None:
    """Write an image of one static program, its entrypoint `/NAME`, to `target` as a Docker archive.

    The same program gives the same bytes.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, program.name, program.read_bytes(), mode=0o755)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
    with tarfile.open(target, mode="w") as tar:
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "layer.tar", layer.getvalue())


def _add(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))
