# SPDX-License-Identifier: Apache-2.0
"""The life of a worker: two listeners and the engine in one event loop, from the first answer to the exit code.

The listeners answer while the ranks load, or are started again. SIGTERM ends the worker with 0 after the running requests. A lost group
that cannot be started again ends it with 70, after its requests were answered with an error. Every wait is bounded: a watchdog thread
ends the process if the loop does not.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.errors import ConfigError, GroupFailed
from diffusion_worker.server.app import control_app, data_app
from diffusion_worker.server.http.connection import BoundedConnection
from diffusion_worker.server.http.origin import is_loopback

EXIT_OK = 0
EXIT_CONFIG = 1
EXIT_GROUP_LOST = os.EX_SOFTWARE  # 70

LOOPBACK = "127.0.0.1"
# Seconds from the end of the drain to the end of the process. Ranks have 5 s to leave before they are killed, clients 3 s to read. The
# operator's pods allow 15 s.
STOP_TIMEOUT_S = 12.0
# Seconds for a finished answer to reach a slow client.
SEND_TIMEOUT_S = 3
# Longer than clients keep an idle connection (aiohttp 15 s, nginx 60 s), so that no connection closes under a client's request.
KEEP_ALIVE_S = 75
# Seconds after which the kernel ends a connection whose client read nothing of the sent data.
UNREAD_TIMEOUT_S = 60
# Seconds that the loop waits for the GIL while a thread encodes an image. Python's own 5 ms exceed any other wait of the loop. With
# shorter intervals the two threads switch too often (P10: 3.0, 2.0, 1.4 and 1.9 ms at 5, 0.5, 0.2 and 0.1 ms).
SWITCH_INTERVAL_S = 0.0002
# Set by the pod's template.
POD_UID_VARIABLE = "DIFFUSION_POD_UID"
TERMINATION_LOG = "/dev/termination-log"
# Bytes that the kubelet reads of it.
TERMINATION_LOG_BYTES = 4096

log = logging.getLogger(__name__)


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Host and ports of the two listeners. Port 0 lets the system choose; the log has the result.

    Without a token the control port ignores `host` and binds to loopback.
    """

    host: str
    port: int
    control_port: int


class Ending(msgspec.Struct, frozen=True):
    """The end of a worker and its reason."""

    exit_code: int
    reason: str


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers, unlike uvicorn's own servers, because the worker handles SIGTERM and SIGINT for both of its listeners."""
        yield


class Watchdog:
    """A timer in another thread that ends the process at its deadline, even if the loop hangs. It runs from `arm` to `disarm`."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def arm(self, ending: Ending, timeout_s: float) -> None:
        """Give the process `timeout_s` from now on to end.

        After that it ends at once, with the code of `ending`, or 70 if that is 0. The reason goes to the log and the termination log.
        """
        self._timer = threading.Timer(timeout_s, _end_at_once, (ending, timeout_s))
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """Cancel the deadline, if one was set; call it after the event loop has been closed."""
        if self._timer is not None:
            self._timer.cancel()


def run(config: WorkerConfig, listen: Listen, make_ranks: Callable[[], RankGroup]) -> int:
    """Run a worker until it is terminated or fails; return the exit code: 0, 1 (configuration) or 70 (ranks lost, or an unexpected error).

    `make_ranks` runs inside the event loop. Unless the code is 0, the reason is written to the kubelet's termination log.

    Raises:
        ConfigError: a port cannot be bound, or the API key or control token cannot be read.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    watchdog = Watchdog()
    ending = asyncio.run(serve(config, listen, make_ranks, watchdog))
    watchdog.disarm()
    if ending.exit_code == EXIT_OK:
        log.info("worker ends exit_code=0 reason=%r", ending.reason)
    else:
        log.error("worker ends exit_code=%d reason=%r", ending.exit_code, ending.reason)
        write_termination_log(ending.reason)
    return ending.exit_code


async def serve(config: WorkerConfig, listen: Listen, make_ranks: Callable[[], RankGroup], watchdog: Watchdog) -> Ending:
    """Start engine and listeners, wait for a signal or the engine's end, shut down in order, and return exit code and reason.

    After a signal requests are drained first, and the code is 0. After a failure clients only get their errors. The watchdog, armed
    here, bounds both; the caller disarms it. ConfigError is raised only for a port or a token.
    """
    stop = _stop_on_signals()
    engine = Engine(config, make_ranks(), boot_id=uuid.uuid4().hex, pod_uid=os.environ.get(POD_UID_VARIABLE, ""))
    listeners, serving = _start_listeners(engine, config, listen)
    # Modules and routes stay to the end. A collection that looks at them stops the loop for as long as it takes.
    gc.freeze()
    gc.enable()
    life = asyncio.create_task(_life(engine))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
    ending = life.result() if life.done() else Ending(EXIT_OK, "a signal asked the worker to end")
    watchdog.arm(ending, config.drain_timeout_s + STOP_TIMEOUT_S)
    if life.done():
        # A client that waits for an image has its error by now, and only has to receive it.
        await _close(engine, listeners, serving)
        await engine.terminate()
    else:
        await engine.terminate()
        await _close(engine, listeners, serving)
    life.cancel()
    stopping.cancel()
    await asyncio.gather(life, stopping, return_exceptions=True)
    return ending


def _start_listeners(engine: Engine, config: WorkerConfig, listen: Listen) -> tuple[list[Listener], list[asyncio.Task[None]]]:
    token_path = Path(config.control_token_path) if config.control_token_path else None
    apps = (data_app(engine, local=is_loopback(listen.host)), control_app(engine, token_path))

    class DataConnection(BoundedConnection):
        limit = apps[0].state.connections

    data = _bind("--port", listen.host, listen.port)
    control = _bind("--control-port", listen.host if token_path else LOOPBACK, listen.control_port)
    (data_host, data_port), (control_host, control_port) = data.getsockname()[:2], control.getsockname()[:2]
    log.info("listening data=%s:%d control=%s:%d boot_id=%s", data_host, data_port, control_host, control_port, engine.boot_id)
    listeners = [_listener(app, DataConnection if app is apps[0] else BoundedConnection) for app in apps]
    serving = [asyncio.create_task(listener.serve([bound])) for listener, bound in zip(listeners, (data, control), strict=True)]
    return listeners, serving


async def _life(engine: Engine) -> Ending:
    """Start the engine and wait until it cannot go on. Return the worker's end for any error: 1 for the configuration, 70 for others."""
    try:
        await engine.start()
        log.info("started state=%s", engine.state)
        return Ending(EXIT_GROUP_LOST, await engine.run_until_failure())
    except ConfigError as error:
        return Ending(EXIT_CONFIG, str(error))
    except GroupFailed as error:
        return Ending(EXIT_GROUP_LOST, str(error))
    except Exception as error:
        log.exception("unexpected error in the worker")
        return Ending(EXIT_GROUP_LOST, f"unexpected error in the worker: {error!r}")


def _stop_on_signals() -> asyncio.Event:
    """Handle SIGTERM and SIGINT: the first sets the returned event, any later one exits at once with 128 plus its number.

    Such an exit leaves no rank behind, because ranks die with their parent.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("%s: draining", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _bind(option: str, host: str, port: int) -> socket.socket:
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ConfigError(f"{option} {port} on {host}: cannot listen: {error.strerror or error}") from None
    # Accepted connections inherit this option. asyncio sets it only if the socket's protocol is TCP's number, and here it is 0. On a kept
    # connection every answer, sent in two parts, then waited 40 ms for the client's delayed acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A client that reads nothing would keep its answer in our memory, and its connection, as long as it likes.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000))
    return bound


def _listener(app: FastAPI, protocol: type[BoundedConnection]) -> Listener:
    return Listener(
        uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SEND_TIMEOUT_S,
        )
    )


async def _close(engine: Engine, listeners: list[Listener], serving: list[asyncio.Task[None]]) -> None:
    """Stop listening, end calls that wait for a change of the state, and wait until all answers are sent and the listeners have ended.

    An answer that is not sent within `SEND_TIMEOUT_S` is cancelled.
    """
    engine.end_watches()
    for listener in listeners:
        listener.should_exit = True
    await asyncio.gather(*serving)


def _end_at_once(ending: Ending, timeout_s: float) -> None:
    reason = f"the shutdown took more than {timeout_s:g} s and was cut off; it began because: {ending.reason}"
    log.error("%s", reason)
    write_termination_log(reason)
    os._exit(ending.exit_code or EXIT_GROUP_LOST)


def write_termination_log(reason: str) -> None:
    """Replace the kubelet's termination log by the reason, cut at 4096 bytes. Do nothing if the file is missing or not writable."""
    path = Path(os.environ.get("DIFFUSION_TERMINATION_LOG", TERMINATION_LOG))
    try:
        with path.open("r+b") as file:
            file.write(reason.encode("utf-8", "replace")[:TERMINATION_LOG_BYTES])
            file.truncate()
    except OSError as error:
        log.debug("no termination log at %s: %s", path, error)
