# SPDX-License-Identifier: Apache-2.0
"""Keeping the children of a deployment as its spec asks."""
