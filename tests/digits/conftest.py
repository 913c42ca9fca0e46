# SPDX-License-Identifier: Apache-2.0
"""Access of the tests to the training code, which is run as a script from its own folder and installed nowhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))
