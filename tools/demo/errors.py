# SPDX-License-Identifier: Apache-2.0
"""Errors that end the demo early."""


class DemoFailed(Exception):
    """A step did not show what it is there to show; the message says what was expected and what was found."""


class TookTooLong(DemoFailed):
    """A wait reached its deadline; the message names the object and the last that was seen of it."""
