# SPDX-License-Identifier: Apache-2.0
"""The rank process: receives the broadcast, lets its worker act, answers. Any surprise ends the process, and with it the group."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import (
    ErrorReport,
    Failed,
    Fatal,
    Finished,
    LoadProgress,
    Ready,
    Rpc,
    RpcReply,
    Shutdown,
    Tick,
    TickDone,
    ToRank,
)
from diffusion_worker.ranks.broadcast import Endpoints, RankEnd
from diffusion_worker.runner.diffusion_worker import DiffusionWorker, Rendezvous

log = logging.getLogger(__name__)

# The methods the server may call, with the types of their arguments: the wire carries names and plain data only.
RPC_METHODS: dict[str, dict[str, Any]] = {
    "add_lora": {"request": LoRARequest, "digest": str | None},
    "remove_lora": {"lora_int_id": int},
    "list_loras": {},
    "sleep": {},
    "wake_up": {},
}


class RankArguments(msgspec.Struct, frozen=True):
    """What a rank process is started with."""

    config: WorkerConfig
    rank: int
    endpoints: Endpoints
    rendezvous: Rendezvous


class WorkerProc:
    """One rank's process: owns the wire and the worker."""

    def __init__(self, arguments: RankArguments, wire: RankEnd, listener: socket.socket | None) -> None:
        self._rank = arguments.rank
        self._wire = wire
        self.worker = DiffusionWorker(arguments.config, rank=arguments.rank, rendezvous=arguments.rendezvous, listener=listener)

    @staticmethod
    def worker_main(encoded: bytes, listener: socket.socket | None) -> None:
        """Entry of the process. Exit codes: 0 after `Shutdown`, 1 wrong configuration, 70 anything else."""
        _live_with_the_server()
        arguments = msgspec.msgpack.decode(encoded, type=RankArguments)
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank={arguments.rank} %(message)s", force=True)
        with RankEnd(arguments.endpoints) as wire:
            code = _run(arguments, wire, listener)
        # Past interpreter shutdown: a process group that lost a rank must not be waited for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def load(self) -> None:
        """Load the model and say so."""

        def report(done: int, total: int) -> None:
            self._wire.send(LoadProgress(self._rank, done, total))

        model = self.worker.load_model(report)
        self._wire.send(Ready(self._rank, os.getpid(), model, self.worker.memory()))

    def worker_busy_loop(self) -> None:
        """Act on every message in order until `Shutdown`."""
        while not isinstance(message := self.recv_message(), Shutdown):
            if isinstance(message, Tick):
                self._tick(message)
            else:
                self.return_result(self.execute_rpc(message))

    def recv_message(self) -> ToRank:
        """The next message of the broadcast."""
        return self._wire.receive()

    def execute_rpc(self, rpc: Rpc) -> RpcReply:
        """Call the method it names. The caller's errors are answered as such, others as RankFailed; the loop goes on."""
        try:
            types = RPC_METHODS[rpc.method]
            kwargs = {name: msgspec.msgpack.decode(value, type=types[name]) for name, value in rpc.kwargs.items()}
            result = getattr(self.worker, rpc.method)(**kwargs)
        except RequestError as error:
            return RpcReply(rpc.call_id, self._rank, error=ErrorReport(error.code, error.message))
        except Exception as error:
            log.exception("rpc method=%s failed", rpc.method)
            return RpcReply(rpc.call_id, self._rank, error=ErrorReport(ErrorCode.RANK_FAILED, f"{type(error).__name__}: {error}"))
        return RpcReply(rpc.call_id, self._rank, result=msgspec.msgpack.encode(result), memory=self.worker.memory())

    def return_result(self, reply: RpcReply) -> None:
        """Answer the server."""
        self._wire.send(reply)

    def _tick(self, tick: Tick) -> None:
        started = time.monotonic()
        output = self.worker.execute_stepwise(tick)
        if self._rank != 0:
            return
        frames = list(output.pictures.values())
        done = TickDone(
            number=tick.number,
            finished=[Finished(name, index, frame.shape) for index, (name, frame) in enumerate(output.pictures.items())],
            failed=[Failed(name, error) for name, error in output.errors.items()],
            rows=output.rows,
            calls=output.calls,
            seconds=time.monotonic() - started,
        )
        self._wire.send(done, [frame.data.cast("B") for frame in frames])


def _run(arguments: RankArguments, wire: RankEnd, listener: socket.socket | None) -> int:
    try:
        proc = WorkerProc(arguments, wire, listener)
        proc.load()
        proc.worker_busy_loop()
        proc.worker.shutdown()
        return 0
    except ConfigError as error:
        wire.send(Fatal(arguments.rank, str(error), config=True))
        return 1
    except Exception as error:
        log.exception("rank failed")
        wire.send(Fatal(arguments.rank, f"{type(error).__name__}: {error}"))
        return 70


def _live_with_the_server() -> None:
    """Ctrl-C is the server's to handle; and a rank dies with its server, even from inside a collective."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        multiprocessing.connection.wait([server.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="server-watch", daemon=True).start()
