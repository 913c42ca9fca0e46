# SPDX-License-Identifier: Apache-2.0
"""The operator's exceptions, grouped by the code that handles them.

OperatorError
 ├─ SettingsError
 ├─ KindsOutdated
 ├─ WatchStale
 ├─ NotUnderstood
 ├─ ClusterError
 │   ├─ ClusterUnavailable
 │   ├─ ClusterConflict
 │   ├─ ClusterRefused
 │   └─ NamespaceEnds
 └─ ControlError
     ├─ ControlUnreachable
     └─ ControlRefused

NotLeading stands apart: no part of a pass may take it for its own failure.
"""

from diffusion_operator.api.worker_state import WireError


class OperatorError(Exception):
    """Base of all our errors; the queue logs it in one line and tries the key again."""


class NotLeading(BaseException):
    """Another process leads, or may lead by now: the pass ends, and says nothing. Like a cancellation it is no Exception."""


class SettingsError(OperatorError):
    """A flag or file the process was started with is unusable; __main__ prints it and exits 2."""


class KindsOutdated(OperatorError):
    """The kinds in the cluster are older than the operator; the process ends with it, and is started again."""


class WatchStale(OperatorError):
    """A watch was stalled for so long that only a new process helps; the liveness probe fails with it."""


class NotUnderstood(OperatorError):
    """A stored object is not of the schema that this operator reads; its status says so, and an edit wakes it."""

    def __init__(self, kind: str, name: str, why: str) -> None:
        """`why` has the field, what was expected there and what was found."""
        text = f"{kind} {name} is not understood: {why}"
        super().__init__(text)
        self.why = why


class ClusterError(OperatorError):
    """The Kubernetes API did not do what was asked."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", said: str = "", retry_after_s: float = 0.0) -> None:
        """Keep what the API server answered.

        `status` is the HTTP status, 0 without an answer. `reason` is a word such as `Forbidden`, and empty if the server gave none. `said`
        is the server's sentence, or else `message`. `retry_after_s` is 0 unless the server asked for a pause.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.said = said or message
        self.retry_after_s = retry_after_s


class ClusterUnavailable(ClusterError):
    """Network, 429 or 5xx; the queue backs off and tries again."""


class ClusterConflict(ClusterError):
    """409: the object is another one than expected; the next pass observes again."""


class ClusterRefused(ClusterError):
    """4xx: quota, Pod Security, validation, rights; the reconcile shows it as a condition."""


class NamespaceEnds(ClusterError):
    """403: nothing can be made in a namespace that is being deleted; there is nothing to do, and nothing to tell."""


class ControlError(OperatorError):
    """A worker's control API did not do what was asked."""

    def __init__(self, message: str, *, code: str, retryable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class ControlUnreachable(ControlError):
    """No answer in time, or no readable one; counted by the observer, shown after three in a row over 15 s."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="Unreachable", retryable=True)


class ControlRefused(ControlError):
    """An error body of the worker; its code decides whether and when we try again."""

    def __init__(self, error: WireError, *, status: int) -> None:
        super().__init__(error.message or error.code, code=error.code, retryable=error.retryable, retry_after_s=error.retry_after_seconds)
        self.status = status
