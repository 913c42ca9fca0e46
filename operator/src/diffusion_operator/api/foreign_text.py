# SPDX-License-Identifier: Apache-2.0
"""Text and numbers from outside that may reach a status, an Event or a log: cut and escaped, or typed and bounded.

A worker's container image belongs to a tenant, so its words are data. A control character could draw over a terminal. The API server could
refuse a whole status for a number without a bound, and a time could overflow by it.
"""

from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or requests, as int64."""
SmallCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A number of ranks or restarts, as int32."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""An age or a duration; about 30 years at most, which any time can be moved by."""


def plain_text(text: str, limit: int) -> str:
    r"""Escape and shorten text for a status, an Event or a log.

    Each character that is not printable, line breaks included, becomes its Python escape, such as `\n`, `\x1b` or `\u202e`. A result of
    more than `limit` characters, escapes counted, is cut to that length and ends with `…`.
    """
    cut = text[: limit + 1]
    plain = cut if cut.isprintable() else "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


WORD_LENGTH = 32


class OpenWord(StrEnum):
    """Base of enums to which a newer worker may add words: an unknown word is kept as text, and equals none of the members."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        other = str.__new__(cls, plain_text(value, WORD_LENGTH))
        other._name_, other._value_ = "OTHER", str.__str__(other)
        return other

    @property
    def known(self) -> bool:
        return self.name in type(self).__members__
