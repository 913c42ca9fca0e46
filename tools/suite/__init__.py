# SPDX-License-Identifier: Apache-2.0
"""The test suite as a whole: its stages, and the order of its files."""
