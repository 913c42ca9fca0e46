# SPDX-License-Identifier: Apache-2.0
"""Errors of the development cluster: the command line prints the message alone, so each says what to do.

DevclusterError
├── PrerequisiteMissing
├── CommandFailed
├── NotOfThisMachine
└── NotRunning
"""

from __future__ import annotations


class DevclusterError(Exception):
    """The development cluster cannot do what was asked; the command line prints it and exits 1."""


class PrerequisiteMissing(DevclusterError):
    """Something the machine must have is not there; raised before anything is changed."""


class CommandFailed(DevclusterError):
    """A program that we ran ended badly; the message carries the end of what it printed."""


class NotOfThisMachine(DevclusterError):
    """The cluster's nodes run elsewhere, so nobody here can break them or look beneath them; tests of that are skipped."""


class NotRunning(DevclusterError):
    """There is no running cluster to work on; `up` starts one."""
