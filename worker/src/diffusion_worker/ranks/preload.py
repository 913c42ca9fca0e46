# SPDX-License-Identifier: Apache-2.0
"""Imports of the fork server, so that every rank on a CPU starts with torch, diffusers and the model's classes in memory.

This file only imports: a tensor operation here would start OpenMP threads, and a rank forked after that hangs in its first one.
"""

import contextlib
import gc
import importlib
import os
import signal

# Ctrl-C while this imports ends the fork server at once and without a traceback; it ignores the signal once it serves.
signal.signal(signal.SIGINT, signal.SIG_DFL)

# Modules stay to the end: looking for garbage among them took two fifths of the imports' time.
gc.disable()

import diffusion_worker.ranks.quiet  # noqa: E402, I001

import torch  # noqa: E402, F401

import diffusion_worker.ranks.worker_proc  # noqa: E402, F401

PRELOAD_VARIABLE = "DIFFUSION_INTERNAL_PRELOAD"

for _entry in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")):
    _module, _, _class = _entry.partition(":")
    # A wrong model index is reported by the rank that loads it, with the model's name.
    with contextlib.suppress(ImportError, AttributeError):
        getattr(importlib.import_module(_module), _class)

gc.freeze()
gc.enable()
