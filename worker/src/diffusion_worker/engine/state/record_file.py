# SPDX-License-Identifier: Apache-2.0
"""Files by which a server finds again what an earlier one of the same folder knew."""

from pathlib import Path
from typing import Any

import msgspec


def write_record(path: Path, record: Any) -> None:
    """Write a record as JSON, whole or not at all, and make the folder if it is missing. Raises OSError."""
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(msgspec.json.encode(record))
    part.replace(path)
