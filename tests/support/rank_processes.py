# SPDX-License-Identifier: Apache-2.0
"""Two real rank processes in one gloo group, each running a scenario of `Parallel`; what they saw comes back."""

import multiprocessing
import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from diffusion_worker.runner.calls import ModelCall
from diffusion_worker.runner.parallel import CallFailed, Parallel

WORLD = 2
DEADLINE_S = 90.0


def run(scenario: str) -> list[Any]:
    """Run a scenario on every rank; what each rank returned, in rank order."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: Any = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, scenario, results), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    return [found for _, found in sorted(results.get() for _ in ranks)]


def _rank(rank: int, port: int, scenario: str, results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, WORLD, rank == 0, timedelta(seconds=30))
    parallel = Parallel(rank=rank, world=WORLD, device=torch.device("cpu"), store=store, timeout_s=30)
    results.put((rank, SCENARIOS[scenario](parallel)))
    parallel.close()


def _call(rows: int) -> ModelCall:
    return ModelCall("transformer", "forward", {"hidden_states": torch.arange(rows * 3.0).reshape(rows, 3), "scale": 2.0})


def _spread(parallel: Parallel) -> list[dict[str, Any]]:
    """Calls of one to five rows: which rows ran here, and the gathered result."""
    seen = []
    for rows in range(1, 6):
        ran: list[int] = []

        def execute(call: ModelCall, part: slice, ran: list[int] = ran) -> Any:
            ran.extend(range(part.start, part.stop))
            states = call.arguments["hidden_states"]
            return states * call.arguments["scale"], [states.sum(dim=1).to(torch.int32)]

        doubled, (sums,) = parallel.run(_call(rows), execute)
        seen.append({"ran": ran, "doubled": doubled.tolist(), "sums": sums.tolist()})
    return seen


def _one_fails(parallel: Parallel) -> dict[str, Any]:
    """Rank 1 raises in a shared call; the call after it must work."""

    def execute(call: ModelCall, part: slice) -> torch.Tensor:
        if parallel.rank == 1:
            raise RuntimeError("out of memory")
        return call.arguments["hidden_states"] + 0

    try:
        parallel.run(_call(4), execute)
    except CallFailed as error:
        message = str(error)
    after = parallel.run(_call(2), lambda call, part: call.arguments["hidden_states"] + 1)
    return {"message": message, "after": after.tolist()}


SCENARIOS = {"spread": _spread, "one fails": _one_fails}
