# SPDX-License-Identifier: Apache-2.0
"""Watches of workers, and calls to them."""
