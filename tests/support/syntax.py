# SPDX-License-Identifier: Apache-2.0
"""Python sources as syntax trees."""

import ast
from contextlib import suppress

TRIES = 10


def parse(source: str) -> ast.Module:
    """Parse a source; try again where CPython 3.11 fails with `SystemError` (python/cpython#106905).

    The parser keeps one depth for the whole process. Formatting a traceback parses too, and a finalizer may do that meanwhile.
    """
    for _ in range(TRIES - 1):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)
