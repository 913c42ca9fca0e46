# SPDX-License-Identifier: Apache-2.0
"""The first lines of a rank's process: it imports, receives its orders, and becomes the rank that they name.

A standby's orders come when a rank is lost, if ever. It imports in a thread, so that the main thread sees the end of the server meanwhile.
No file here imports torch at its top: the server imports this one.
"""

import contextlib
import os
import signal
import socket
import threading
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from unittest.mock import patch

# The message of a process that is past its imports.
IMPORTED = b"imported"
# The scheduling policy of a standby's imports. A thread of it interrupts no other one that wakes. Threads that libraries start meanwhile
# keep it, and it does not slow them down. Under the idle policy they would wait for a processor that nobody else wants, and no thread may
# leave that policy.
IMPORTING_POLICY = os.SCHED_BATCH
EXIT_IMPORTS = 71


def rank_main(orders: Connection, standby: bool) -> None:
    """Import, wait for the orders, and run the rank. The end of the server ends a process that waits.

    The orders of a rank that is no standby are here already.
    """
    if standby:
        # It ends with the server, which decides what Ctrl-C means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        importing = threading.Thread(target=_import, args=(orders,), name="imports", daemon=True)
        importing.start()
        arguments, listener = _receive(orders)
        importing.join()
    else:
        # A spawned rank imports for seconds now: Ctrl-C ends it at once and without a traceback, as it ends the fork server.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        import diffusion_worker.ranks.imports  # noqa: F401

        arguments, listener = _receive(orders)
    from diffusion_worker.ranks.worker_proc import WorkerProc

    WorkerProc.worker_main(arguments, listener)


def give_orders(orders: Connection, pid: int, arguments: bytes, listener: socket.socket | None) -> None:
    """Send a process what makes it a rank: its arguments, and to rank 0 the listening socket where the ranks meet (None for others).

    Raises:
        OSError: the process has ended.
    """
    orders.send_bytes(arguments)
    orders.send(listener is not None)
    if listener is not None:
        reduction.send_handle(orders, listener.fileno(), pid)


def _receive(orders: Connection) -> tuple[bytes, socket.socket | None]:
    try:
        arguments = orders.recv_bytes()
        listener = socket.socket(fileno=reduction.recv_handle(orders)) if orders.recv() else None
    except (EOFError, OSError):
        os._exit(0)  # the server has ended, or has no use for this process
    orders.close()
    return arguments, listener


def _import(orders: Connection) -> None:
    """Import what ranks need on this thread, under `IMPORTING_POLICY`, then send `IMPORTED` to the server.

    If an import fails, or leaves a process that could not become any rank, print the error and end the process.
    """
    try:
        os.sched_setscheduler(0, IMPORTING_POLICY, os.sched_param(0))
        # Libraries ask whether there is a GPU. NVML answers without CUDA.
        with patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
            import diffusion_worker.ranks.imports  # noqa: F401
        from diffusion_worker.ranks.start_check import require_untouched_device

        require_untouched_device()
        with contextlib.suppress(OSError):  # the server has ended, which the main thread sees too
            orders.send_bytes(IMPORTED)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_IMPORTS)
