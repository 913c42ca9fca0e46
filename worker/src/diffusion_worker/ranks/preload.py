# SPDX-License-Identifier: Apache-2.0
"""Imports of the fork server, so that every rank on a CPU starts with torch, diffusers and the model's classes in memory."""

import signal

# Ctrl-C while this imports ends the fork server at once and without a traceback; it ignores the signal once it serves.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import diffusion_worker.ranks.imports  # noqa: E402, F401
