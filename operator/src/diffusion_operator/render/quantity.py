# SPDX-License-Identifier: Apache-2.0
"""Quantities of Kubernetes in bytes, in the forms that the schema lets through."""

import re
from decimal import Decimal

_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_FORM = re.compile(r"([0-9]+(?:[.][0-9]+)?)([A-Za-z]*)")


def quantity_bytes(given: int | str) -> int:
    """Convert a Kubernetes quantity to bytes, and round down to an integer.

    It may be a whole or decimal number, with or without suffix: `5Gi`, `1500M`, `0.5Ti`. Raises ValueError for any other form.
    """
    found = _FORM.fullmatch(str(given))
    if found is None or found[2] not in _FACTORS:
        raise ValueError(f"expected a quantity as in 5Gi, found {given!r}")
    return int(Decimal(found[1]) * _FACTORS[found[2]])
