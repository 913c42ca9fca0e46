# SPDX-License-Identifier: Apache-2.0
"""An adapter on a disk: each write of its weights or its configuration is seen without reading the files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.sources.fetching import Fetched, Fetcher
from diffusion_worker.sources.source import Source


async def look(path: Path) -> Fetched:
    fetcher = Fetcher(WorkerConfig(model="/models/digits", served_name="digits"))
    return await fetcher.fetch_adapter(Source(path=str(path)), digest=None, deadline_s=30, report=lambda done, total: None, name="a")


def replaced(path: Path) -> None:
    """Replace a file by another one with the same bytes and times."""
    other, times = path.with_suffix(".new"), path.stat()
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(path)


def rewritten(path: Path) -> None:
    """Write other bytes of the same length into a file, and restore the time of its last change."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("change", [replaced, rewritten, Path.unlink])
async def test_weights_and_configuration_that_were_written_are_another_state_of_the_source(
    change: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "other.safetensors").write_bytes(b"weights")
    before = await look(tmp_path)
    assert not (await look(tmp_path)).may_differ(before)
    change(tmp_path / file)
    assert (await look(tmp_path)).may_differ(before)
