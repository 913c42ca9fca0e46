# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the operator, and what they share."""
