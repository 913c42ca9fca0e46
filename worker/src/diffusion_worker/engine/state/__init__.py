# SPDX-License-Identifier: Apache-2.0
"""The engine's lifecycle, its state document and operations, and the protocol to a rank group."""
