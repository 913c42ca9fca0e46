# SPDX-License-Identifier: Apache-2.0
"""A message of a program, and the kinds of messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """The kind of a message, which is the section of the file that has it."""

    CONDITION = "Conditions and Events"
    ERROR = "Errors"
    LOG = "Log lines of level WARNING and above"
    METRIC = "Metrics"
    API = "Descriptions in the HTTP API"


@dataclass(frozen=True)
class Message:
    """A text that users read, or a part of one: its kind, the line where it begins, its code or level, and the text."""

    kind: Kind
    line: int
    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label}: {self.text}" if self.label else self.text
