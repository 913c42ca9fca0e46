# SPDX-License-Identifier: Apache-2.0
"""The versions from which an upgrade must work, and back. Every test of upgrades runs once for each of them."""

from __future__ import annotations

UPGRADES_FROM = {"before 0.1.0": "3e8db6b73289e96c05b1a8dd7e6cf1c2c04da713"}
"""Commits by version. Each release adds its own, under the name of its tag without the `v`."""
