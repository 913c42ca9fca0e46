# SPDX-License-Identifier: Apache-2.0
"""Settings that keep imports quiet and short. Every process that imports torch for a rank imports this file first."""

import contextlib
import logging
import os
import warnings
from unittest.mock import patch

# diffusers imports both quantisers, which log what they lack, and torch logs a warning about one. Other
# libraries call what torch deprecates. A user can do nothing about these lines.
for _noisy in ("bitsandbytes", "diffusers.quantizers", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)

# bitsandbytes gives torch functions to compile, for which torch would import its compiler: a tenth of a rank's imports. Nothing calls these
# functions. Only --quantization nf4 needs it, so that a machine may come without.
with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"), contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401
