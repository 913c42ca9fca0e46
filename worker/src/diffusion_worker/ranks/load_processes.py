# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters as the server sees them: each is a process, which is killed alone at its deadline.

They come from the fork server that ranks on a CPU come from. It has torch and diffusers imported: names are converted by diffusers'
own functions, and a process that imported them for itself would take seconds. The server owns the memory that a load
writes to, and ranks open it there; so a load that dies leaves nothing.
"""

import asyncio
import contextlib
import logging
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.loads.order import LoadOrder, LoadOutcome
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import PreparedPart
from diffusion_worker.ranks.launch import fork_server, without_main

log = logging.getLogger(__name__)

MAX_PROCESSES = 4
END_S = 5.0


class PreparedAdapter:
    """An adapter ready for the ranks to open. Close it when they have: what they opened stays theirs."""

    def __init__(self, parts: list[PreparedPart], memories: list[int]) -> None:
        self.parts = parts
        self._memories = memories

    def close(self) -> None:
        """Give the server's hold on the memory back; harmless when repeated."""
        while self._memories:
            os.close(self._memories.pop())


class LoadProcesses:
    """Starts and ends them, on the server's event loop."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(MAX_PROCESSES)

    async def prepare(
        self, tables: dict[bytes, list[int]], request: LoRARequest, options: LoadOptions, *, timeout_s: float
    ) -> PreparedAdapter:
        """Have an adapter read, checked and written for ranks, whose tables these are.

        Raises:
            RequestError: the adapter is wrong; Timeout; EngineFailed where the process was ended by something else.
        """
        memories: list[int] = []
        try:
            async with asyncio.timeout(timeout_s), self._running:
                for _ in tables:
                    memories.append(os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                paths = [f"/proc/{os.getpid()}/fd/{memory}" for memory in memories]
                order = LoadOrder(
                    request=request,
                    options=options,
                    tables=list(tables),
                    ranks=list(tables.values()),
                    memories=paths,
                    deadline_s=timeout_s,
                )
                outcome = await _run(order)
        except TimeoutError:
            _close_all(memories)
            message = f"adapter {request.lora_name!r}: expected its files read and checked within {timeout_s:.3g} s, its load was ended"
            raise RequestError(ErrorCode.TIMEOUT, message) from None
        except BaseException:
            _close_all(memories)
            raise
        if outcome.error is not None:
            _close_all(memories)
            raise RequestError(ErrorCode(outcome.error.code), outcome.error.message)
        return PreparedAdapter(outcome.parts, memories)


async def _run(order: LoadOrder) -> LoadOutcome:
    """Run a load to its end, or kill it."""
    context, name = fork_server(), order.request.lora_name
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_load_main, args=(msgspec.msgpack.encode(order), sender), name=without_main("load"), daemon=True)
    starting = asyncio.ensure_future(asyncio.to_thread(process.start))
    try:
        # It may wait for the fork server's imports. A start that is given up is still waited for, and its process killed then.
        await asyncio.shield(starting)
        sender.close()
        data = await asyncio.to_thread(_received, receiver)
        if data is not None:
            return msgspec.msgpack.decode(data, type=LoadOutcome)
        await asyncio.to_thread(process.join, END_S)
        raise _death(name, process.exitcode)
    finally:
        ending = asyncio.ensure_future(_end(starting, process, receiver, sender))
        await asyncio.shield(ending)


def _received(receiver: Connection) -> bytes | None:
    """Receive the answer of the process; None where it dies before that. In a thread: killing the process ends it."""
    try:
        return receiver.recv_bytes()
    except (EOFError, OSError):
        return None


async def _end(starting: "asyncio.Future[None]", process: BaseProcess, *connections: Connection) -> None:
    with contextlib.suppress(Exception):
        await starting
    if process.pid is not None:
        process.kill()
        await asyncio.to_thread(process.join, END_S)
        with contextlib.suppress(ValueError):  # the kernel holds it in a read that does not end
            process.close()
    for connection in connections:
        connection.close()


def _death(name: str, code: int | None) -> RequestError:
    """Explain the end of a load that gave no answer."""
    if code == -signal.SIGPROF:
        message = f"adapter {name!r}: the patterns of its configuration take more than a second to match"
        return RequestError(ErrorCode.INVALID_ADAPTER, message)
    ended = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    log.error("adapter=%s its load was ended by %s", name, ended)
    return RequestError(ErrorCode.ENGINE_FAILED, f"adapter {name!r}: the process that loaded it was ended by {ended}")


def _close_all(memories: list[int]) -> None:
    while memories:
        os.close(memories.pop())


def _load_main(encoded: bytes, sender: Any) -> None:
    """The process entry; torch is imported here and not above, in the load and not in the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from diffusion_worker import withheld
    from diffusion_worker.lora.loads.process import prepare_bounded

    withheld.install()
    outcome = prepare_bounded(msgspec.msgpack.decode(encoded, type=LoadOrder))
    sender.send_bytes(msgspec.msgpack.encode(outcome))
    sender.close()
    # Past interpreter shutdown: threads that read or hash are not waited for.
    os._exit(0)
