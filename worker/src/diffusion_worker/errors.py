# SPDX-License-Identifier: Apache-2.0
"""Every error that leaves the worker; `WorkerError` is the base of all.

- `ConfigError`: an option, the model folder or a file is wrong at start. The command line prints it and exits with 1.
- `GroupFailed`: the rank group is lost, because a rank died or missed a deadline. It is restarted, a few times in ten minutes.
- `LoadTimeout`, a `GroupFailed`: the group did not load its model in time. The server exits with 70.
- `RequestError`: one call cannot be served. Both ports answer it as JSON with its code.
"""

import enum
from typing import Any


class ErrorCode(enum.StrEnum):
    """The closed list of codes a client can meet; `STATUS` has the HTTP status of each."""

    INVALID_REQUEST = "InvalidRequest"
    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    # OpenAI's own spelling, by which clients recognise it.
    MODEL_NOT_FOUND = "model_not_found"
    CONFLICT = "Conflict"
    WRONG_BOOT = "WrongBoot"
    STALE_EPOCH = "StaleEpoch"
    INVALID_ADAPTER = "InvalidAdapter"
    UNSUPPORTED_FORMAT = "UnsupportedFormat"
    NO_MATCHING_MODULES = "NoMatchingModules"
    MODULES_OUTSIDE_ENVELOPE = "ModulesOutsideEnvelope"
    RANK_TOO_LARGE = "RankTooLarge"
    DIGEST_MISMATCH = "DigestMismatch"
    IDENTITY_MISMATCH = "IdentityMismatch"
    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_UNAUTHORIZED = "SourceUnauthorized"
    SECRET_MISSING = "SecretMissing"
    NETWORK_ERROR = "NetworkError"
    TOO_LARGE = "TooLarge"
    CACHE_FULL = "CacheFull"
    MANAGED = "Managed"
    CAPACITY_EXCEEDED = "CapacityExceeded"
    ADAPTER_NOT_LOADED = "AdapterNotLoaded"
    ADAPTER_REMOVED = "AdapterRemoved"
    STARTING = "Starting"
    ASLEEP = "Asleep"
    BUSY = "Busy"
    TERMINATING = "Terminating"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    RANK_FAILED = "RankFailed"
    ENGINE_FAILED = "EngineFailed"
    REQUEST_FAILED = "RequestFailed"
    TIMEOUT = "Timeout"
    CANCELLED = "Cancelled"
    OVERLOADED = "Overloaded"
    VERIFICATION_FAILED = "VerificationFailed"
    MEMORY_NOT_RELEASED = "MemoryNotReleased"


STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.WRONG_BOOT: 409,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.INVALID_ADAPTER: 400,
    ErrorCode.UNSUPPORTED_FORMAT: 400,
    ErrorCode.NO_MATCHING_MODULES: 400,
    ErrorCode.MODULES_OUTSIDE_ENVELOPE: 400,
    ErrorCode.RANK_TOO_LARGE: 400,
    ErrorCode.DIGEST_MISMATCH: 409,
    ErrorCode.IDENTITY_MISMATCH: 409,
    # A source's status is not passed on: 401 and 403 would mean that the worker's own token was wrong.
    ErrorCode.SOURCE_NOT_FOUND: 404,
    ErrorCode.SOURCE_UNAUTHORIZED: 502,
    ErrorCode.SECRET_MISSING: 503,
    ErrorCode.NETWORK_ERROR: 502,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.CACHE_FULL: 507,
    ErrorCode.MANAGED: 409,
    ErrorCode.CAPACITY_EXCEEDED: 409,
    ErrorCode.ADAPTER_NOT_LOADED: 503,
    ErrorCode.ADAPTER_REMOVED: 410,
    ErrorCode.STARTING: 503,
    ErrorCode.ASLEEP: 503,
    ErrorCode.BUSY: 503,
    ErrorCode.TERMINATING: 503,
    ErrorCode.INSUFFICIENT_MEMORY: 507,
    ErrorCode.RANK_FAILED: 500,
    ErrorCode.ENGINE_FAILED: 500,
    # The model failed on this one request, and would fail again; a 5xx would make clients repeat it.
    ErrorCode.REQUEST_FAILED: 422,
    ErrorCode.TIMEOUT: 504,
    # nginx's status for a request that its client closed: every standard error status blames the client or the server.
    ErrorCode.CANCELLED: 499,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.VERIFICATION_FAILED: 500,
    ErrorCode.MEMORY_NOT_RELEASED: 500,
}

# Codes of calls that may succeed later unchanged.
RETRYABLE = frozenset(
    {
        ErrorCode.SOURCE_UNAUTHORIZED,
        ErrorCode.SECRET_MISSING,
        ErrorCode.NETWORK_ERROR,
        ErrorCode.CACHE_FULL,
        ErrorCode.ADAPTER_NOT_LOADED,
        ErrorCode.STARTING,
        ErrorCode.ASLEEP,
        ErrorCode.BUSY,
        ErrorCode.TERMINATING,
        ErrorCode.INSUFFICIENT_MEMORY,
        ErrorCode.RANK_FAILED,
        ErrorCode.ENGINE_FAILED,
        ErrorCode.TIMEOUT,
        ErrorCode.OVERLOADED,
        ErrorCode.VERIFICATION_FAILED,
        ErrorCode.MEMORY_NOT_RELEASED,
    }
)


class Fault(enum.StrEnum):
    """Kind of an error's cause. `Request` ends one request, and `OutOfMemory` does so where it can; the others lose the rank group."""

    REQUEST = "Request"
    OUT_OF_MEMORY = "OutOfMemory"
    # The device cannot be used any more in this process: an illegal address, an ECC error.
    DEVICE = "Device"
    # A collective failed: the other ranks wait in it, or are gone.
    COLLECTIVE = "Collective"
    # A rank ended without reporting an error: killed by a signal, or by the kernel for lack of memory.
    DIED = "Died"
    # A rank is stopped, or missed a deadline.
    STALLED = "Stalled"
    # A defect in our code, or in a library.
    DEFECT = "Defect"


class WorkerError(Exception):
    """Base of all errors of the worker; never raised itself."""


class ConfigError(WorkerError):
    """Raised at start when the worker cannot serve its configuration; the command line prints it and exits 1."""


class GroupFailed(WorkerError):
    """Raised to waiters for the rank group when a rank died or missed a deadline; the engine restarts the group."""


class LoadTimeout(GroupFailed):
    """Raised when the ranks need longer than the startup timeout; a restart would need as long, so the server exits with 70."""


class RequestError(WorkerError):
    """Raised when one call cannot be served; the HTTP edge answers it with its code and message.

    `lasting` marks an error as permanent although its code is usually retryable.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
        lasting: bool = False,
    ) -> None:
        super().__init__(message)
        self._lasting = lasting
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.details = details or {}

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return STATUS[self.code]

    @property
    def retryable(self) -> bool:
        """True if a client may repeat the call unchanged: the code is in RETRYABLE, and this error is not marked as lasting."""
        return self.code in RETRYABLE and not self._lasting


def refused(field: str, expected: str, found: object) -> RequestError:
    """Return an InvalidRequest error that names a field of the request, the expected value and the value found."""
    return RequestError(ErrorCode.INVALID_REQUEST, f"{field}: expected {expected}, found {found}", details={"field": field})
