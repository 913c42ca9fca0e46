# SPDX-License-Identifier: Apache-2.0
"""The rank process: it receives the broadcast, runs its worker and answers. An unexpected error ends it, and with it the group."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from tqdm.std import tqdm  # type: ignore[import-untyped]

from diffusion_worker import withheld
from diffusion_worker.config import StartMethod, WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, RequestError
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.main_thread import OWN
from diffusion_worker.messages import (
    Dropped,
    ErrorReport,
    Failed,
    Fatal,
    LoadProgress,
    PreparedPart,
    Ready,
    Replay,
    Rpc,
    RpcReply,
    Shutdown,
    SleepTask,
    Tick,
    TickDone,
    ToRank,
    WakeTask,
)
from diffusion_worker.ranks.broadcast import Endpoints, RankEnd
from diffusion_worker.ranks.extension import extended_worker
from diffusion_worker.ranks.finished_images import ImageReport
from diffusion_worker.ranks.output import RankSender
from diffusion_worker.ranks.start_check import check_start
from diffusion_worker.runner.diffusion_worker import DiffusionWorker, Rendezvous
from diffusion_worker.runner.model_call.faults import RankFault, classify, require_usable_rank

log = logging.getLogger(__name__)

EXIT_FAULT = 70

# The methods the server may call, with the types of their arguments: the wire carries names and plain data only.
RPC_METHODS: dict[str, dict[str, Any] | None] = {
    "add_lora": {"request": LoRARequest, "options": LoadOptions, "parts": list[PreparedPart]},
    "adapter_table": {},
    "remove_lora": {"lora_int_id": int},
    "list_loras": {},
    "pin_lora": {"lora_int_id": int},
    "unpin_lora": {"lora_int_id": int},
    "mirror_weights": {},
    "handle_sleep_task": {"task": SleepTask},
    "handle_wake_task": {"task": WakeTask},
    "fingerprint": {"probe": bool, "contents": bool},
    "synchronize": {},
    "warm_up": {},
    "profile": {"is_start": bool, "prefix": str},
    "load_weights": {"path": str},
    "re_init_pipeline": {"pipeline": str},
}


class RankArguments(msgspec.Struct, frozen=True):
    """The arguments that make a process a rank: its number, the configuration, the wire's addresses, and where the ranks meet.

    `folders` are those that the ranks remove after a server that was killed.
    """

    config: WorkerConfig
    rank: int
    endpoints: Endpoints
    rendezvous: Rendezvous
    folders: list[str]
    start_method: StartMethod
    # Hold no weights until the first wake.
    asleep: bool = False
    log_level: int = logging.INFO


class WorkerProc:
    """The main loop of a rank process, between the wire and the worker.

    Methods in `extension` accept any plain data, others only typed arguments. Replies and images leave through `output` in the order of the
    messages. So images finished before a sleep arrive before its answer.
    """

    def __init__(
        self, rank: int, output: RankSender, wire: RankEnd, worker: DiffusionWorker, extension: frozenset[str] = frozenset()
    ) -> None:
        self.worker = worker
        self._rank = rank
        self._output = output
        self._wire = wire
        self._methods = {**dict.fromkeys(extension), **RPC_METHODS}

    @staticmethod
    def worker_main(encoded: bytes, listener: socket.socket | None) -> None:
        """Run the rank and end this process: exit with 0 after `Shutdown`, 1 for a wrong configuration, 70 for any other error.

        `encoded` are `RankArguments`; `listener` is the socket where the ranks meet, for rank 0 alone.
        """
        arguments = msgspec.msgpack.decode(encoded, type=RankArguments)
        _live_with_the_server(arguments.folders)
        _keep_no_named_locks()
        logging.basicConfig(level=arguments.log_level, format=f"%(asctime)s %(levelname)s rank={arguments.rank} %(message)s", force=True)
        withheld.install()
        with RankEnd(arguments.endpoints) as wire:
            code = _run(arguments, wire, listener)
        # Skip the interpreter's shutdown, which would wait for a process group that lost a rank.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def load(self, *, asleep: bool) -> None:
        """Load the model, without its weights if `asleep`; send progress meanwhile, and `Ready` at the end."""

        def report(done: int, total: int) -> None:
            self._output.send(LoadProgress(self._rank, done, total))

        model = self.worker.load_model(report, asleep=asleep)
        withheld.withhold()
        self._output.send(Ready(self._rank, os.getpid(), model, self.worker.memory()))

    def worker_busy_loop(self) -> None:
        """Receive and act: a `Tick` advances requests, an `Rpc` is run and answered.

        Return at `Shutdown`, once the queue of answers is empty.
        """
        while True:
            message, frames = self.recv_message()
            OWN.passed()
            if isinstance(message, Shutdown):
                self._output.flush()
                return
            if isinstance(message, Tick):
                self._tick(message, frames)
            elif (reply := self.execute_rpc(message)) is not None:
                self.return_result(reply)

    def recv_message(self) -> tuple[ToRank, list[bytes]]:
        """Wait for the next message of the broadcast, and return it with its frames.

        Bytes that are no message are counted, reported to the server and not acted on.
        """
        return self._wire.receive(self._on_dropped, self._output.check)

    def _on_dropped(self, count: int) -> None:
        log.warning("this rank dropped an invalid message of the server process, %d so far", count)
        self._output.send(Dropped(self._rank, count))

    def execute_rpc(self, rpc: Rpc) -> RpcReply | None:
        """Call the method that a message names and return the reply; return None if the call is for other ranks.

        A RequestError is answered with its code, another error as RankFailed or InsufficientMemory, and the loop goes on. An error that the
        rank cannot survive ends it.
        """
        if not rpc.runs_on(self._rank):
            return None
        try:
            kwargs = self._kwargs(rpc)
            result = getattr(self.worker, rpc.method)(**kwargs)
            # A result that is not asked for is dropped here, not held until the next message.
            encoded = msgspec.msgpack.encode(result) if rpc.output_rank in (None, self._rank) else None
        except RequestError as error:
            return RpcReply(rpc.call_id, self._rank, error=ErrorReport(error.code, error.message))
        except Exception as error:
            require_usable_rank(error)
            log.exception("a call of this rank failed method=%s", rpc.method)
            code = ErrorCode.INSUFFICIENT_MEMORY if classify(error) is Fault.OUT_OF_MEMORY else ErrorCode.RANK_FAILED
            reply = RpcReply(rpc.call_id, self._rank, error=ErrorReport(code, f"{type(error).__name__}: {error}"))
        else:
            return RpcReply(rpc.call_id, self._rank, result=encoded, memory=self.worker.memory())
        # This is outside the except block, whose traceback would keep the failed call's objects alive.
        self.worker.free_memory()
        return reply

    def _kwargs(self, rpc: Rpc) -> dict[str, Any]:
        """Decode the arguments of an `Rpc` to their declared types.

        Methods that are not listed, unknown names and wrong types raise RequestError (InvalidRequest).
        """
        if rpc.method not in self._methods:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{rpc.method}: the ranks' worker has no such method to call")
        types = self._methods[rpc.method]
        if types is not None and (unknown := sorted(set(rpc.kwargs) - set(types))):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{rpc.method}: expected only arguments that it has, found {', '.join(unknown)}")
        try:
            return {name: msgspec.msgpack.decode(value, type=types[name] if types else Any) for name, value in rpc.kwargs.items()}
        except msgspec.DecodeError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{rpc.method}: {error}") from None

    def return_result(self, reply: RpcReply) -> None:
        """Send a reply to the server, after all messages before it, without waiting for those."""
        self._output.send(reply)

    def _tick(self, tick: Tick, frames: list[bytes]) -> None:
        started = time.monotonic()
        output = self.worker.execute_stepwise(tick, frames)
        if any(error.code == ErrorCode.INSUFFICIENT_MEMORY for error in output.errors.values()):
            self.worker.free_memory()
        if self._rank != 0:
            return
        done = TickDone(
            number=tick.number,
            failed=[Failed(name, error) for name, error in output.errors.items()],
            replays=[Replay(name, what) for name, what in output.replays.items()],
            rows=output.rows,
            calls=output.calls,
            seconds=time.monotonic() - started,
            denoise_seconds=output.denoise_seconds,
            peak_bytes=output.peak_bytes,
            split=output.split,
            progress=output.progress,
            features=output.features,
            skipped=output.skipped,
            prompt_cache=output.prompt_cache,
        )
        if not output.images and not output.previews:
            self._output.send(done)
            return
        report = ImageReport(done, output)
        report.begin_copies()
        self._output.send_when_ready(report.make)


def _run(arguments: RankArguments, wire: RankEnd, listener: socket.socket | None) -> int:
    output = RankSender(wire.send)
    try:
        # The server's own folder is the first.
        OWN.show(Path(arguments.folders[0]), arguments.rank)
        check_start(arguments.config.device, arguments.rank, arguments.start_method)
        worker_class, extension = extended_worker(arguments.config.worker_extension)
        worker = worker_class(arguments.config, rank=arguments.rank, rendezvous=arguments.rendezvous, listener=listener)
        proc = WorkerProc(arguments.rank, output, wire, worker, extension)
        proc.load(asleep=arguments.asleep)
        proc.worker_busy_loop()
        worker.shutdown()
        return 0
    except ConfigError as error:
        output.send_final(Fatal(arguments.rank, str(error), config=True))
        return 1
    except RankFault as error:
        log.error("this rank ends: %s", error)
        output.send_final(Fatal(arguments.rank, str(error), fault=error.fault))
    except Exception as error:
        log.exception("this rank failed unexpectedly, and ends")
        fault = classify(error)
        words = withheld.words_of(error)
        if fault is Fault.OUT_OF_MEMORY:
            words = f"{ErrorCode.INSUFFICIENT_MEMORY}: {words}"
        output.send_final(Fatal(arguments.rank, words, fault=Fault.DEFECT if fault is Fault.REQUEST else fault))
    return EXIT_FAULT


def _live_with_the_server(folders: list[str]) -> None:
    """Ignore Ctrl-C, which the server handles, and kill this process when the server ends, even inside a collective.

    The ranks also remove the folders that a killed server left.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        multiprocessing.connection.wait([server.sentinel])
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="server-watch", daemon=True).start()


def _keep_no_named_locks() -> None:
    """Give tqdm a lock of this process. The default is a named semaphore, which a killed rank would leave in /dev/shm."""
    tqdm.set_lock(threading.RLock())
