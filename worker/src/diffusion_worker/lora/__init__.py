# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a rank: reading, slots, layers."""
