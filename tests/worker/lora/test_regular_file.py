# SPDX-License-Identifier: Apache-2.0
"""Only regular files beneath the root of an adapter are opened."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.located import CONFIG_FILE, PEFT_WEIGHTS
from diffusion_worker.lora.regular_file import open_regular
from support.worker.process import DIGITS

STRIPES = DIGITS / "loras" / "stripes"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Provide a folder with a file in a folder inside; a file `outside` lies beside it."""
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "inner" / "file").write_bytes(b"inside")
    (tmp_path / "outside").write_bytes(b"outside")
    return tmp_path / "root"


def _read(path: Path, root: Path | None) -> bytes:
    with os.fdopen(open_regular(path, "adapter 'a'", root=root), "rb") as file:
        return file.read()


@pytest.mark.parametrize("target", ["inner/file", "inner/../inner/./file", "inner/link", "deep/link"])
def test_files_and_links_beneath_the_root_are_read(root: Path, target: str) -> None:
    (root / "inner" / "link").symlink_to("../inner/file")
    (root / "deep").symlink_to("inner")
    assert _read(root / target, root) == b"inside"


@pytest.mark.parametrize(
    "target", ["../outside", "inner/../../outside", "up", "absolute", "absolute-inside", "folder/outside", "/etc/hostname", "inner/chain"]
)
def test_nothing_leads_out_of_the_root(root: Path, target: str) -> None:
    (root / "up").symlink_to("../outside")
    (root / "absolute").symlink_to(root.parent / "outside")
    (root / "absolute-inside").symlink_to(root / "inner" / "file")
    (root / "folder").symlink_to("..")
    (root / "inner" / "chain").symlink_to("../up")
    with pytest.raises(RequestError, match=r"adapter 'a': .* is not within the folder or volume of its source") as refused:
        _read(root / target, root)
    assert refused.value.code is ErrorCode.INVALID_ADAPTER


def test_links_in_a_circle_end(root: Path) -> None:
    (root / "circle").symlink_to("circle")
    with pytest.raises(RequestError, match="circle cannot be read: Too many levels"):
        _read(root / "circle", root)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is a pipe, expected a regular file"),
    "a socket": (_socket, "is a socket, expected a regular file"),
    "a folder": (Path.mkdir, "is a folder, expected a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a regular file"),
    # The memory of a process is a regular file whose first page cannot be read.
    "a read error": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: Input/output error"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [CONFIG_FILE, PEFT_WEIGHTS])
def test_an_adapter_with_something_else_than_files_is_refused_at_once_by_its_name_and_the_file(
    kind: str, name: str, tmp_path: Path
) -> None:
    make, says = SPECIAL[kind]
    # The path of a socket must be short.
    folder = Path("/tmp") / f"sock-{os.getpid()}" if kind == "a socket" else tmp_path / "a"
    shutil.copytree(STRIPES, folder)
    try:
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(RequestError) as refused:
            read_checkpoint(str(folder), name="style")
    finally:
        shutil.rmtree(folder)
    assert (refused.value.code, refused.value.message.startswith("adapter 'style': ")) == (ErrorCode.INVALID_ADAPTER, True)
    assert name in refused.value.message and says in refused.value.message


def test_a_nul_in_a_path_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"adapter 'style': .*embedded null byte"):
        read_checkpoint("/tmp/a\0b", name="style")
