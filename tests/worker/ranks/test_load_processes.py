# SPDX-License-Identifier: Apache-2.0
"""Each load is a process of its own: its failure, end or delay concerns only its own put."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import encode
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.ranks.load_processes import LoadProcesses
from support.lora.loads import blocks, manager_of, request, write_file

# The fork server takes seconds to import torch.
pytestmark = pytest.mark.slow


def _metadata(**settings: Any) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 2} | settings)}


def _costly(folder: Path) -> Path:
    """Write an adapter file whose alpha pattern takes for ever to match its module's name; return the file's path."""
    folder.parent.mkdir(exist_ok=True)
    patterns = {r"(\w|\w\w)+\d!": 3}
    return write_file(folder, nn.ModuleDict({"a" * 60: nn.Linear(8, 8)}), metadata=_metadata(**{"transformer.alpha_pattern": patterns}))


def _fields(pid: int | str) -> list[str]:
    """Return the fields of a process's /proc/PID/stat that follow its name: the state, the parent's pid and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _loads() -> dict[int, int]:
    """Return the nice value of each load's process, by its id. These are the children of this process's fork server."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            fields = _fields(entry.name)
            of_fork_server = b"forkserver" in Path(f"/proc/{fields[1]}/cmdline").read_bytes()
            if of_fork_server and int(_fields(fields[1])[1]) == os.getpid():
                found[int(entry.name)] = int(fields[16])
    return found


async def _running() -> int:
    """Wait until a load's process runs, at most a minute, and return its pid."""
    async with asyncio.timeout(60):
        while not (found := _loads()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return next(iter(found))


async def _prepare(loads: LoadProcesses, path: Path, manager: DiffusionLoRAManager, timeout_s: float = 60.0) -> list[Any]:
    prepared = await loads.prepare({encode(manager.table()): [0]}, request(path), LoadOptions(), timeout_s=timeout_s)
    try:
        return [manager.adopt(request(path), LoadOptions(), part) for part in prepared.parts]
    finally:
        prepared.close()


async def _refusal(loads: LoadProcesses, path: Path, timeout_s: float = 60.0) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await _prepare(loads, path, manager_of(blocks()), timeout_s)
    assert "'style'" in refused.value.message
    return refused.value


def _memories() -> int:
    found = [entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd:adapter" in name for name in found)


async def test_a_load_leaves_its_adapter_with_the_rank_and_nothing_with_anybody_else(tmp_path: Path) -> None:
    path, manager, loads = write_file(tmp_path / "style", blocks()), manager_of(blocks()), LoadProcesses()
    [loaded] = await _prepare(loads, path, manager)
    assert (loaded.rank, loaded.modules, loaded.checksum != "") == (2, 9, True)
    assert (_loads(), _memories()) == ({}, 0)


async def test_a_pattern_that_takes_for_ever_ends_its_own_load_within_seconds(tmp_path: Path) -> None:
    costly, loads = _costly(tmp_path / "style"), LoadProcesses()
    other = write_file(tmp_path / "other", blocks())
    await _prepare(loads, other, manager_of(blocks()))
    error, *_ = await asyncio.gather(_refusal(loads, costly), _prepare(loads, other, manager_of(blocks())))
    assert (error.code, "patterns of its configuration" in error.message) == (ErrorCode.INVALID_ADAPTER, True), error.message
    assert (_loads(), _memories()) == ({}, 0)


async def test_thousands_of_patterns_take_no_more_than_their_second_together(tmp_path: Path) -> None:
    patterns = {f"no_such_module_{number}.{number}": 1 for number in range(50_000)}
    path = write_file(tmp_path / "style", blocks(40), metadata=_metadata(**{"transformer.alpha_pattern": patterns}))
    error = await _refusal(LoadProcesses(), path)
    assert (error.code, "patterns of its configuration" in error.message) == (ErrorCode.INVALID_ADAPTER, True), error.message


@pytest.mark.parametrize(
    ("act", "code", "says"),
    [
        (signal.SIGKILL, ErrorCode.ENGINE_FAILED, "was ended by SIGKILL"),
        (signal.SIGSTOP, ErrorCode.TIMEOUT, "within 3 s, with the wait for other loads; its load was ended"),
    ],
)
async def test_a_load_that_is_killed_or_hangs_is_an_error_of_its_own_put(
    act: signal.Signals, code: ErrorCode, says: str, tmp_path: Path
) -> None:
    costly, loads = _costly(tmp_path / "style"), LoadProcesses()
    other = write_file(tmp_path / "other", blocks())
    await _prepare(loads, other, manager_of(blocks()))
    refusal = asyncio.create_task(_refusal(loads, costly, timeout_s=60.0 if act is signal.SIGKILL else 3.0))
    os.kill(await _running(), act)
    [loaded] = await _prepare(loads, other, manager_of(blocks()))
    error = await refusal
    assert (error.code, says in error.message) == (code, True), error.message
    assert loaded.rank == 2 and (_loads(), _memories()) == ({}, 0)


async def test_a_put_that_is_given_up_takes_its_load_with_it(tmp_path: Path) -> None:
    task = asyncio.create_task(_prepare(LoadProcesses(), _costly(tmp_path / "style"), manager_of(blocks())))
    await _running()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (_loads(), _memories()) == ({}, 0)


async def test_at_most_four_loads_run_at_once_and_give_way_to_steps(tmp_path: Path) -> None:
    costly, loads = _costly(tmp_path / "style"), LoadProcesses()
    puts = [asyncio.create_task(_refusal(loads, costly)) for _ in range(6)]
    most, nice = 0, set[int]()
    while not all(put.done() for put in puts):
        running = _loads()
        most, nice = max(most, len(running)), nice | set(running.values())
        await asyncio.sleep(0.02)
    assert [put.result().code for put in puts] == [ErrorCode.INVALID_ADAPTER] * 6
    assert (most, max(nice)) == (4, min(19, os.nice(0) + 10))


async def test_adapters_that_are_off_are_refused_by_name(tmp_path: Path) -> None:
    path = write_file(tmp_path / "style", blocks())
    table = msgspec.structs.replace(manager_of(blocks()).table(), slots=0)
    with pytest.raises(RequestError, match="adapters are off"):
        await LoadProcesses().prepare({encode(table): [0]}, request(path), LoadOptions(), timeout_s=60.0)
