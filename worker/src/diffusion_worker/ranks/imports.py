# SPDX-License-Identifier: Apache-2.0
"""All that a rank imports before it knows its number: torch, the runner and the model's classes.

This file only imports: a tensor operation here would start OpenMP threads, and a rank forked after that hangs in its first one.
"""

import contextlib
import gc
import importlib
import os

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
