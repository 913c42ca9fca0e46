# SPDX-License-Identifier: Apache-2.0
"""Keeps imports quiet and short. Every process that imports torch for a rank imports this first."""

import logging
import os
from unittest.mock import patch

# diffusers imports both quantisers, which say what they lack, and torch what it thinks of one of them; nobody asked.
for _noisy in ("bitsandbytes", "diffusers.quantizers", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

# It gives torch functions to compile, and torch would import its compiler for that: a tenth of what a rank imports. Nothing calls them.
with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
    import bitsandbytes  # noqa: F401
