# SPDX-License-Identifier: Apache-2.0
"""Imports of the fork server, so that every rank on a CPU starts with torch, diffusers and the model's classes in memory."""

import atexit
import os
import signal

# The interpreter's shutdown takes a second, and libraries print lines there about objects that they leaked. Ranks do not run it.
_pid = os.getpid()
atexit.register(lambda: os._exit(0) if os.getpid() == _pid else None)
# Ctrl-C while this imports ends the fork server at once and without a traceback; it ignores the signal once it serves.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import diffusion_worker.ranks.imports  # noqa: E402, F401
