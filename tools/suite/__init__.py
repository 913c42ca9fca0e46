# SPDX-License-Identifier: Apache-2.0
"""The test suite as a whole: its stages, the order of its files, and a ledger of its time."""
