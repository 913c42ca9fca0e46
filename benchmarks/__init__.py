# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each of a goal in `registry.py`."""
