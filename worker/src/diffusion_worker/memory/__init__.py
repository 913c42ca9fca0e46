# SPDX-License-Identifier: Apache-2.0
"""Placement of weights, and ways to free their memory."""
