# SPDX-License-Identifier: Apache-2.0
"""Chooses which requests make the next step together, and runs the steps."""
