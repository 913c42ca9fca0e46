# SPDX-License-Identifier: Apache-2.0
"""A Docker archive with the images of kubeadm's static pods and add-ons, of the pause container and of kindnetd.

Nothing is compressed, and images share layers: the same programs and tools give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from .. import programs
from ..errors import CommandFailed

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_FILTERS = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")


@dataclass(frozen=True)
class _Image:
    layers: list[bytes]
    entrypoint: str


def write(names: Iterable[str], target: Path) -> None:
    """Write a Docker archive to `target` with an image for each name, such as `registry.k8s.io/pause:3.10`.

    The last word before the tag says which of our programs the image is of.

    Raises:
        CommandFailed: a name is none of a program that we have.
    """
    images = _images()
    with tarfile.open(target, "w") as tar:
        manifest, written = [], set[str]()
        for name in names:
            program = name.rpartition("/")[2].partition(":")[0]
            if program not in images:
                raise CommandFailed(f"kubeadm asks for the image {name}; expected one of {', '.join(sorted(images))}")
            manifest.append(_add_image(tar, name, images[program], written))
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _images() -> dict[str, _Image]:
    names = (*_SERVERS, "kube-proxy", "kindnetd")
    of_kube = _layer({"usr/local/bin/kube": programs.kube() / "kube"}, {f"usr/local/bin/{name}": "kube" for name in names})
    tools = _layer(links={f"usr/sbin/{name}": "xtables-nft-multi" for name in _FILTERS}, tree=programs.packet_filters())
    alone = {"etcd": programs.etcd(), "coredns": programs.coredns(), "pause": programs.pause()}
    return {
        **{name: _Image([of_kube], name) for name in _SERVERS},
        **{name: _Image([tools, of_kube], name) for name in ("kube-proxy", "kindnetd")},
        **{name: _Image([_layer({f"usr/local/bin/{name}": program})], f"/usr/local/bin/{name}") for name, program in alone.items()},
    }


def _layer(files: dict[str, Path] | None = None, links: dict[str, str] | None = None, tree: Path | None = None) -> bytes:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        if tree:
            tar.add(tree, arcname=".", filter=_unowned)
        for name, path in (files or {}).items():
            member = _unowned(tar.gettarinfo(path.resolve(), name))
            assert member is not None
            member.mode = 0o755
            with path.open("rb") as file:
                tar.addfile(member, file)
        for name, to in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, to
            tar.addfile(member)
    return out.getvalue()


def _unowned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.mtime = 0
    member.uname = member.gname = ""
    return None if member.name.startswith(("./usr/share", "./usr/sbin/iptables", "./usr/sbin/ip6tables")) else member


def _add_image(tar: tarfile.TarFile, name: str, image: _Image, written: set[str]) -> dict[str, object]:
    digests = [hashlib.sha256(layer).hexdigest() for layer in image.layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [_PATH], "Entrypoint": [image.entrypoint]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    text = json.dumps(config, sort_keys=True).encode()
    files = {f"{hashlib.sha256(text).hexdigest()}.json": text}
    files |= {f"{digest}.tar": layer for digest, layer in zip(digests, image.layers, strict=True)}
    for file in files.keys() - written:
        _add(tar, file, files[file])
    written.update(files)
    return {"Config": next(iter(files)), "RepoTags": [name], "Layers": [f"{digest}.tar" for digest in digests]}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, BytesIO(content))
