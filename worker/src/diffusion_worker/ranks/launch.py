# SPDX-License-Identifier: Apache-2.0
"""The start of rank processes, from the fork server or by spawn: their environment, their arguments, and where they meet."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, spawn, util
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.config import StartMethod, WorkerConfig, read_model_index
from diffusion_worker.errors import ConfigError
from diffusion_worker.main_thread import SeenMainThread
from diffusion_worker.ranks.broadcast import ServerEnd
from diffusion_worker.ranks.rank_main import give_orders, rank_main
from diffusion_worker.ranks.rank_process import RankProcess
from diffusion_worker.ranks.start_method import start_method_of

NAME_PREFIX = "diffusion-worker-"
_preparation_data = spawn.get_preparation_data


class NewProcess:
    """A process without orders. It imports what a rank needs, a standby behind all others, and then waits for what makes it a rank."""

    def __init__(self, method: StartMethod, name: str, *, standby: bool) -> None:
        """Start the process. The call blocks: the first start from the fork server waits some seconds for its imports."""
        context = _context(method)
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=rank_main, args=(theirs, standby), name=without_main(name), daemon=True)
        with theirs:
            try:
                self.process.start()
            except BaseException:
                self.orders.close()
                raise

    def become(self, arguments: bytes, listener: socket.socket | None) -> bool:
        """Send the process its orders, which make it a rank, and close the connection. Return False if the process has ended."""
        assert self.process.pid is not None
        try:
            give_orders(self.orders, self.process.pid, arguments, listener)
        except OSError:
            return False
        finally:
            self.orders.close()
        return True


def start_processes(
    config: WorkerConfig,
    generation: int,
    wire: ServerEnd,
    started: Callable[[RankProcess], bool],
    asleep: bool = False,
    standbys: Sequence[NewProcess] = (),
) -> None:
    """Start every rank; `started` is called with each, and returns False to start no more.

    Standbys become ranks first. Those that are not needed are ended. The call blocks: the first start from the fork server waits some
    seconds for its imports; others take milliseconds. A spawned rank imports for itself. If adapters may come, the fork server is started
    beside spawned ranks too.

    Raises:
        ConfigError: the address where the ranks are to meet cannot be listened on.
    """
    method = start_method_of(config)
    spare = list(standbys)
    try:
        _set_environment(config)
        # The port is bound here and handed to rank 0, so that no other process can take it in between.
        listener = _listen(config.rendezvous_host, config.rendezvous_port, backlog=2 * config.ranks)
        with listener:
            rendezvous = {"host": config.rendezvous_host, "port": listener.getsockname()[1], "generation": generation}
            for number in range(config.ranks):
                main_thread = SeenMainThread(wire.folder, number)
                arguments = _arguments(config, number, wire, rendezvous, method, asleep)
                process = _start_one(spare, method, number, arguments, listener if number == 0 else None)
                if not started(RankProcess(number, process, main_thread)):
                    return
        if config.max_loras:
            # The loads of adapters come from it too. Beside spawned ranks the first adapter would wait for its imports.
            fork_server()
            forkserver.ensure_running()
    finally:
        for unused in spare:
            unused.orders.close()


def _start_one(spare: list[NewProcess], method: StartMethod, number: int, arguments: bytes, listener: socket.socket | None) -> BaseProcess:
    """Return the process of a rank: a standby, which is taken from `spare`, or else a new one."""
    while spare:
        standby = spare.pop()
        if standby.become(arguments, listener):
            return standby.process
    new = NewProcess(method, f"rank-{number}", standby=False)
    # The death of a process that has just been started is seen like that of any rank.
    new.become(arguments, listener)
    return new.process


def _context(method: StartMethod) -> SpawnContext | ForkServerContext:
    if method is StartMethod.SPAWN:
        return multiprocessing.get_context("spawn")
    return fork_server()


def fork_server() -> ForkServerContext:
    """Return the context of this process's fork server, which starts with the first process that it makes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusion_worker.ranks.preload"])
    return context


def kill_fork_server() -> None:
    """Kill this process's fork server, if there is one. A start that waits for its imports fails then with EOFError."""
    if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def without_main(what: str) -> str:
    """Return `what` as a name for a process, with a prefix that keeps the process from importing the main script.

    It also patches this process's multiprocessing to honour the prefix.
    """
    spawn.get_preparation_data = _preparation_without_main
    return f"{NAME_PREFIX}{what}"


def _preparation_without_main(name: str) -> dict[str, Any]:
    """Return the data that a new process starts with; for a process of this package, without the import of the main script.

    A user's script may have no guard, and would then start its own ranks in every rank.
    """
    told: dict[str, Any] = _preparation_data(name)
    if name.startswith(NAME_PREFIX):
        told = {key: value for key, value in told.items() if not key.startswith("init_main")}
    return told


def _listen(host: str, port: int, *, backlog: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=backlog)
    except OSError as error:
        raise ConfigError(f"--rendezvous-address {host}:{port}: cannot listen: {error.strerror or error}") from None


def _arguments(config: WorkerConfig, rank: int, wire: ServerEnd, rendezvous: dict[str, object], method: StartMethod, asleep: bool) -> bytes:
    return msgspec.msgpack.encode(
        {
            "config": config,
            "rank": rank,
            "endpoints": wire.endpoints,
            "rendezvous": rendezvous,
            "start_method": method,
            "asleep": asleep,
            # Folders that a killed server cannot remove: those of its sockets and of the fork server's.
            "folders": [str(wire.folder), util.get_temp_dir()],
            # Ranks log at the level of the process that starts them: a server logs more than a script.
            "log_level": logging.getLogger("diffusion_worker").getEffectiveLevel(),
        }
    )


def _set_environment(config: WorkerConfig) -> None:
    """Set variables in this process's environment, which ranks inherit; values that users set for OpenMP and gloo stay.

    Ranks of the fork server inherit the environment as it was when that started.
    """
    index = read_model_index(config.model)
    classes = [f"diffusers:{index['_class_name']}"]
    classes += [f"{value[0]}:{value[1]}" for value in index.values() if isinstance(value, list) and len(value) == 2 and value[0]]
    os.environ["DIFFUSION_INTERNAL_PRELOAD"] = ",".join(classes)
    # OpenMP threads spin at barriers by default: with more threads than idle cores a step took twenty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.rendezvous_host.startswith("127.") and Path("/sys/class/net/lo").exists():
        # Ranks that meet on the loopback also speak there; without this gloo binds to whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
