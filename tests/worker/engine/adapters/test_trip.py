# SPDX-License-Identifier: Apache-2.0
"""The trip of a put through the engine: the files whose functions run between the route and the ranks, for each kind of outcome."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import diffusion_worker.engine
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport
from support.worker.server_edge import Edge, fall_asleep, serving_edge

ENGINE = Path(diffusion_worker.engine.__file__).parent
TRIP = {
    "engine.py",
    "adapters/machine.py",
    "adapters/runner.py",
    "adapters/table.py",
    "state/histogram.py",
    "state/lifecycle.py",
    "state/rank_calls.py",
}


async def files_of_a_put(edge: Edge, name: str, path: str) -> tuple[int, set[str]]:
    """Put an adapter; return the answer's status and the files of the engine whose functions ran."""
    files: set[str] = set()

    def called(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and ENGINE in file.parents:
            files.add(str(file.relative_to(ENGINE)))

    before: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(called)
    try:
        answer = await edge.put_adapter(name, path)
    finally:
        sys.setprofile(before)
    return answer.status_code, files


async def files_of_puts(edge: Edge, status: int, *puts: tuple[str, str]) -> set[str]:
    """Put several adapters one after another, each of which must get this status; return the files whose functions ran in each put.

    Files that run only for other tasks of the engine are so left out.
    """
    found = [await files_of_a_put(edge, *put) for put in puts]
    assert [each for each, _ in found] == [status] * len(puts)
    return set.intersection(*(files for _, files in found))


async def test_a_put_passes_through_seven_files_of_the_engine_whatever_comes_of_it() -> None:
    async with serving_edge(ranks=2) as edge:
        for path in ("/wrong-1", "/wrong-2"):
            edge.ranks.adapter_errors[path] = ErrorReport(ErrorCode.INVALID_ADAPTER, f"no adapter_config.json in {path}")
        new = await files_of_puts(edge, 200, ("a", "/a"), ("b", "/b"), ("c", "/c"))
        replacing = await files_of_puts(edge, 200, ("a", "/other-1"), ("b", "/other-2"))
        refused = await files_of_puts(edge, 400, ("d", "/wrong-1"), ("e", "/wrong-2"))
        await fall_asleep(edge)
        asleep = await files_of_puts(edge, 200, ("f", "/f"), ("g", "/g"))
    assert new == TRIP
    assert replacing | refused | asleep <= TRIP
