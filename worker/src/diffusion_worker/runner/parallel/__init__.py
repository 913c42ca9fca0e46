# SPDX-License-Identifier: Apache-2.0
"""The work of one model call on several ranks: rows, tokens, layers, weights, tiles."""
