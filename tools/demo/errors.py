# SPDX-License-Identifier: Apache-2.0
"""Errors that end the demo early."""


class DemoFailed(Exception):
    """A step of the demo did not show its claim, or kubectl or Helm failed; the message says what was found."""


class TookTooLong(DemoFailed):
    """A wait reached its deadline; the message names the object or the command, and its last known state if there is one."""
