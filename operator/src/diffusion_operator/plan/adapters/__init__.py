# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: which are served, where each one is, which calls to make, and their status."""
