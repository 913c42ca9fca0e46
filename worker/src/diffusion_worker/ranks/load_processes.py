# SPDX-License-Identifier: Apache-2.0
"""Processes that load adapters for the server: one for each load, killed at the load's deadline.

They come from the fork server of the ranks on a CPU, which has torch and diffusers imported. A load needs diffusers' functions to convert
names, and would take seconds to import them. The server owns the memory that a load writes to, and ranks open it there; so a load that dies
leaves nothing.
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
    """An adapter in memory that ranks can open. Close it when they have opened it: their views of the memory stay valid."""

    def __init__(self, parts: list[PreparedPart], memories: list[int]) -> None:
        self.parts = parts
        self._memories = memories

    def close(self) -> None:
        """Close the server's descriptors of the memory; closing again does nothing."""
        while self._memories:
            os.close(self._memories.pop())


class LoadProcesses:
    """The loads of a server, at most `MAX_PROCESSES` at a time. Use it on the server's event loop."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(MAX_PROCESSES)

    async def prepare(
        self, tables: dict[bytes, list[int]], request: LoRARequest, options: LoadOptions, *, timeout_s: float
    ) -> PreparedAdapter:
        """Have a process read and check an adapter, and write it to memory for the ranks of each table. The caller closes the result.

        Raises:
            RequestError: the adapter is wrong; EngineFailed where the process was ended by something else. Timeout: it is not done after
                `timeout_s`, in which the wait for other loads counts; the process is killed then.
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
            expected = f"expected its files to be read and checked within {timeout_s:.3g} s, with the wait for other loads"
            raise RequestError(ErrorCode.TIMEOUT, f"adapter {request.lora_name!r}: {expected}; its load was ended") from None
        except BaseException:
            _close_all(memories)
            raise
        if outcome.error is not None:
            _close_all(memories)
            raise RequestError(ErrorCode(outcome.error.code), outcome.error.message)
        return PreparedAdapter(outcome.parts, memories)


async def _run(order: LoadOrder) -> LoadOutcome:
    """Run a load in a process and return its outcome; kill the process at the end, or when cancelled."""
    context, name = fork_server(), order.request.lora_name
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_load_main, args=(msgspec.msgpack.encode(order), sender), name=without_main("load"), daemon=True)
    starting = asyncio.ensure_future(asyncio.to_thread(process.start))
    try:
        # The start may wait for the fork server's imports. When cancelled, `_end` waits for it and then kills the process.
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
    """Wait for the answer of a process; return None where it dies first. It runs in a thread, and ends when the process is killed."""
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
    """Log and return the error for a load that ended without an answer: EngineFailed, or InvalidAdapter if its patterns took too long."""
    if code == -signal.SIGPROF:
        message = f"adapter {name!r}: the patterns of its configuration take more than a second to match"
        return RequestError(ErrorCode.INVALID_ADAPTER, message)
    ended = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    log.error("adapter=%s not loaded: the process that loads it was ended by %s", name, ended)
    return RequestError(ErrorCode.ENGINE_FAILED, f"adapter {name!r}: the process that loaded it was ended by {ended}")


def _close_all(memories: list[int]) -> None:
    while memories:
        os.close(memories.pop())


def _load_main(encoded: bytes, sender: Any) -> None:
    """Run a load, send its encoded outcome, and end this process.

    It imports torch here, because the server imports this file and must not import torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from diffusion_worker import withheld
    from diffusion_worker.lora.loads.process import prepare_bounded

    withheld.install()
    outcome = prepare_bounded(msgspec.msgpack.decode(encoded, type=LoadOrder))
    sender.send_bytes(msgspec.msgpack.encode(outcome))
    sender.close()
    # Skip the interpreter's shutdown, which would wait for threads that read or hash.
    os._exit(0)
