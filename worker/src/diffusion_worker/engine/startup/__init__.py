# SPDX-License-Identifier: Apache-2.0
"""The way of ranks to where they serve: fetch, warm-up, verification, and a new start after a loss."""
