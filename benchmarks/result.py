# SPDX-License-Identifier: Apache-2.0
"""What a benchmark gives back."""

import msgspec


class Measured(msgspec.Struct, frozen=True):
    """Figures of a goal, what they are held against, and every sample behind them."""

    results: dict[str, float]
    targets: dict[str, str]
    samples: list[dict[str, float]]
