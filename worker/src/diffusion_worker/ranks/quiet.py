# SPDX-License-Identifier: Apache-2.0
"""Settings that keep imports quiet and short. Every process that imports torch for a rank imports this file first."""

import logging
import os
from unittest.mock import patch

# diffusers imports both quantisers, which log what they lack, and torch logs a warning about one. A user can do nothing about these lines.
for _noisy in ("bitsandbytes", "diffusers.quantizers", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

# bitsandbytes gives torch functions to compile, for which torch would import its compiler: a tenth of a rank's imports. Nothing calls these
# functions.
with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
    import bitsandbytes  # noqa: F401
