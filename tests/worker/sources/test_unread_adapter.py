# SPDX-License-Identifier: Apache-2.0
"""Facts about an adapter's file that are known before any rank reads it."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.fetching import Fetched, Fetcher
from diffusion_worker.sources.unread_adapter import check_unread
from support.sources.rig import fetch_processes
from support.worker.process import DIGITS

WEIGHTS = DIGITS / "loras" / "stripes" / "adapter_model.safetensors"
DIGEST = "sha256:" + hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
OTHER = "sha256:" + "0" * 64


def code(path: Path, digest: str | None = None) -> ErrorCode:
    with pytest.raises(RequestError, match="'a'") as error:
        check_unread(path, digest=digest, name="a")
    return error.value.code


@pytest.mark.parametrize("path", [WEIGHTS, WEIGHTS.parent])
def test_a_file_or_folder_that_is_right_has_the_digest_that_is_expected(path: Path) -> None:
    assert check_unread(path, digest=DIGEST, name="a") == DIGEST
    assert check_unread(path, digest=None, name="a") is None


def test_other_bytes_than_expected_are_refused() -> None:
    assert code(WEIGHTS, OTHER) is ErrorCode.DIGEST_MISMATCH


@pytest.mark.parametrize("content", [b"", b"{}", WEIGHTS.read_bytes()[:-1], b"\x08" + b"\0" * 7 + b"nonsense"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert code(tmp_path) is ErrorCode.INVALID_ADAPTER


def test_a_file_that_is_gone_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nowhere")
    assert code(tmp_path / "nobody") in (ErrorCode.SOURCE_NOT_FOUND, ErrorCode.INVALID_ADAPTER)
    assert code(tmp_path) in (ErrorCode.SOURCE_NOT_FOUND, ErrorCode.INVALID_ADAPTER)


def test_of_several_files_the_usual_one_is_looked_at_and_without_one_they_are_refused(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).write_bytes(b"nonsense")
    assert code(tmp_path) is ErrorCode.INVALID_ADAPTER
    shutil.copy(WEIGHTS, tmp_path / "pytorch_lora_weights.safetensors")
    assert check_unread(tmp_path, digest=DIGEST, name="a") == DIGEST


async def test_what_came_from_elsewhere_was_looked_at_on_its_way() -> None:
    fetched = Fetched("/nowhere", digest=DIGEST)
    assert await Fetcher(WorkerConfig(model="m", served_name="m")).check_adapter(fetched, digest=OTHER, deadline_s=1.0, name="a") is fetched


async def test_a_file_in_place_is_checked_in_a_process_of_its_own(tmp_path: Path) -> None:
    fetcher = Fetcher(WorkerConfig(model="m", served_name="m"))
    found = await fetcher.check_adapter(Fetched(str(WEIGHTS)), digest=DIGEST, deadline_s=60.0, name="a")
    assert found.digest == DIGEST
    assert (await fetcher.check_adapter(Fetched(str(WEIGHTS)), digest=None, deadline_s=60.0, name="a")).digest is None
    with pytest.raises(RequestError, match=r"adapter 'a': expected sha256:0+, found sha256:") as refused:
        await fetcher.check_adapter(Fetched(str(WEIGHTS)), digest=OTHER, deadline_s=60.0, name="a")
    assert refused.value.code is ErrorCode.DIGEST_MISMATCH
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    (tmp_path / "beside.safetensors").symlink_to(WEIGHTS)
    for path in ("a.safetensors", "beside.safetensors"):
        inside = Fetched(str(tmp_path / path), root=str(tmp_path))
        with pytest.raises(RequestError, match=f"adapter 'a': .*{path}") as refused:
            await fetcher.check_adapter(inside, digest=None, deadline_s=60.0, name="a")
        assert refused.value.code is ErrorCode.INVALID_ADAPTER


async def test_a_header_is_read_in_little_memory_whatever_size_the_file_has_or_claims(tmp_path: Path) -> None:
    def file(name: str, *, claimed: int, size: int) -> str:
        header = json.dumps({"x": {"dtype": "U8", "shape": [claimed], "data_offsets": [0, claimed]}}).encode()
        with (tmp_path / name).open("wb") as written:
            written.write(len(header).to_bytes(8, "little") + header)
            written.truncate(written.tell() + size)
        return str(tmp_path / name)

    fetcher = Fetcher(WorkerConfig(model="m", served_name="m"))
    sparse, liar = file("sparse.safetensors", claimed=3 << 30, size=3 << 30), file("liar.safetensors", claimed=1 << 42, size=9)
    assert (await fetcher.check_adapter(Fetched(sparse), digest=None, deadline_s=60.0, name="a")).digest is None
    with pytest.raises(RequestError, match="expected a complete safetensors file") as refused:
        await fetcher.check_adapter(Fetched(liar), digest=None, deadline_s=60.0, name="a")
    assert refused.value.code is ErrorCode.INVALID_ADAPTER


async def test_a_check_that_takes_too_long_ends_with_its_process() -> None:
    fetcher = Fetcher(WorkerConfig(model="m", served_name="m"))
    with pytest.raises(RequestError, match=r"adapter 'a': its file was not read within 0\.001 s") as refused:
        await fetcher.check_adapter(Fetched(str(WEIGHTS)), digest=DIGEST, deadline_s=0.001, name="a")
    assert refused.value.code is ErrorCode.TIMEOUT
    assert fetch_processes() == []


def test_the_side_of_the_server_has_no_reader_of_headers() -> None:
    probe = "import sys, diffusion_worker.sources.fetching; print(sorted({'numpy', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
