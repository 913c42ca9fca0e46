# SPDX-License-Identifier: Apache-2.0
"""How far two images are from each other."""

import numpy as np
from PIL import Image


def levels_apart(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel of any pixel, in levels of 255."""
    assert one.size == other.size
    return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())
