# SPDX-License-Identifier: Apache-2.0
"""Silences what libraries say at their import. Every process that imports torch for a rank imports this first."""

import logging

# diffusers imports both quantisers, which say what they lack, and torch what it thinks of one of them; nobody asked.
for _noisy in ("bitsandbytes", "diffusers.quantizers", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
