# SPDX-License-Identifier: Apache-2.0
"""The start of rank processes, from the fork server or by spawn: their environment, their arguments, and where they meet."""

import gc
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing import spawn, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.config import StartMethod, WorkerConfig, read_model_index
from diffusion_worker.errors import ConfigError
from diffusion_worker.main_thread import SeenMainThread
from diffusion_worker.ranks.broadcast import ServerEnd
from diffusion_worker.ranks.rank_process import RankProcess
from diffusion_worker.ranks.start_method import start_method_of

NAME_PREFIX = "diffusion-worker-"
_preparation_data = spawn.get_preparation_data


def start_processes(
    config: WorkerConfig, generation: int, wire: ServerEnd, started: Callable[[RankProcess], bool], asleep: bool = False
) -> None:
    """Start every rank; `started` is called with each, and returns False to start no more.

    The call blocks: the first start from the fork server waits some seconds for its imports; others take milliseconds. A spawned rank
    imports for itself.

    Raises:
        ConfigError: the address where the ranks are to meet cannot be listened on.
    """
    method = start_method_of(config)
    context = _context(method)
    _set_environment(config)
    # The port is bound here and handed to rank 0, so that no other process can take it in between.
    listener = _listen(config.rendezvous_host, config.rendezvous_port, backlog=2 * config.ranks)
    try:
        rendezvous = {"host": config.rendezvous_host, "port": listener.getsockname()[1], "generation": generation}
        for number in range(config.ranks):
            process = context.Process(
                target=_worker_main,
                args=(_arguments(config, number, wire, rendezvous, method, asleep), listener if number == 0 else None),
                name=without_main(f"rank-{number}"),
                daemon=True,
            )
            main_thread = SeenMainThread(wire.folder, number)
            process.start()
            if not started(RankProcess(number, process, main_thread)):
                return
    finally:
        listener.close()


def _context(method: StartMethod) -> SpawnContext | ForkServerContext:
    if method is StartMethod.SPAWN:
        return multiprocessing.get_context("spawn")
    return fork_server()


def fork_server() -> ForkServerContext:
    """Return the context of this process's fork server, which starts with the first process that it makes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusion_worker.ranks.preload"])
    return context


def without_main(what: str) -> str:
    """Return a name for a process that keeps it from importing the main script."""
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


def _worker_main(arguments: bytes, listener: socket.socket | None) -> None:
    """Run a rank's process. It imports torch here, because the server imports this file and must not import torch."""
    # A spawned rank imports for seconds now: Ctrl-C ends it at once and without a traceback, as it ends the fork server.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # for the reason given in `preload`
    import diffusion_worker.ranks.quiet  # noqa: F401
    from diffusion_worker.ranks.worker_proc import WorkerProc

    gc.freeze()
    gc.enable()
    WorkerProc.worker_main(arguments, listener)


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
    """Set the environment that ranks inherit. Ranks of the fork server inherit it as it was when that started."""
    index = read_model_index(config.model)
    classes = [f"diffusers:{index['_class_name']}"]
    classes += [f"{value[0]}:{value[1]}" for value in index.values() if isinstance(value, list) and len(value) == 2 and value[0]]
    os.environ["DIFFUSION_INTERNAL_PRELOAD"] = ",".join(classes)
    # OpenMP threads spin at barriers by default: with more threads than idle cores a step took twenty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.rendezvous_host.startswith("127.") and Path("/sys/class/net/lo").exists():
        # Ranks that meet on the loopback also speak there; without this gloo binds to whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
