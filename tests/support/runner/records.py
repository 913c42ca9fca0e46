# SPDX-License-Identifier: Apache-2.0
"""Records of model classes for the length of a test, which replace those of the same name."""

import contextlib
from collections.abc import Iterator

from diffusion_worker.runner.families import registry
from diffusion_worker.runner.families.record import Record


@contextlib.contextmanager
def with_records(*records: Record, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Add or replace records, and take away those of the names in `without`; the registry is as before at the end."""
    before = dict(registry._by_name)
    try:
        for name in without:
            del registry._by_name[name]
        registry._by_name.update({record.name: record for record in records})
        registry._found.clear()
        yield
    finally:
        registry._by_name.clear()
        registry._by_name.update(before)
        registry._found.clear()
