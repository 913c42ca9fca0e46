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
    """An error whose message says what to do; the command line prints the message alone and exits 1."""


class PrerequisiteMissing(DevclusterError):
    """The machine or the environment lacks something; raised before anything is changed."""


class CommandFailed(DevclusterError):
    """A program is missing, failed, or was not done in time; the message has the end of its output if there is any."""


class NotOfThisMachine(DevclusterError):
    """The cluster's nodes run elsewhere, so no test here can break them or look beneath them; such tests are skipped."""


class NotRunning(DevclusterError):
    """There is no running cluster to work on; `up` starts one."""
