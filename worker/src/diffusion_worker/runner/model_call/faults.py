# SPDX-License-Identifier: Apache-2.0
"""Classification of a rank's exception: a single request's fault, or one that the rank and its group cannot survive.

After an illegal address or an ECC error every later call on the device fails. After a failed collective the ranks no longer agree on the
next one. Neither can be mended inside the process, so `require_usable_rank` ends the rank, and the server starts the group again. Out of
memory and errors of one request leave the group serving.
"""

from diffusion_worker.errors import Fault

# Names of classes, because torch has a class only where it was built with the back end.
_MEMORY_TYPES = frozenset({"OutOfMemoryError", "MemoryError"})
_COLLECTIVE_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_DEVICE_TYPES = frozenset({"AcceleratorError"})

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed")
_COLLECTIVE_WORDS = (
    "gloo/transport",
    "nccl error",
    "ncclsystemerror",
    "ncclremoteerror",
    "connection closed by peer",
    "watchdog caught collective",
    "processgroup",
)
_DEVICE_WORDS = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "uncorrectable ecc",
    "ecc error",
    "unspecified launch failure",
    "cuda error",
    "cudnn_status_execution_failed",
    "cublas_status_execution_failed",
)
_GROUP_FAULTS = frozenset({Fault.DEVICE, Fault.COLLECTIVE})


class RankFault(BaseException):
    """Raised where a rank must end. It is a BaseException, so that no `except Exception` on the way to the main loop keeps it."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


def classify(error: BaseException) -> Fault:
    """Return the fault that an exception stands for: by its class and its words, or else by those of its causes.

    `Fault.REQUEST` means that none of them is known for another fault. A RankFault has its own.
    """
    if isinstance(error, RankFault):
        return error.fault
    names = {kind.__name__ for kind in type(error).__mro__}
    words = str(error).lower()
    # Memory comes first, because out of memory on a GPU is a CUDA error too.
    if names & _MEMORY_TYPES or any(word in words for word in _MEMORY_WORDS):
        return Fault.OUT_OF_MEMORY
    # Only a RuntimeError is about devices and collectives. A ValueError that quotes such words is its caller's fault.
    if isinstance(error, RuntimeError):
        if names & _COLLECTIVE_TYPES or any(word in words for word in _COLLECTIVE_WORDS):
            return Fault.COLLECTIVE
        if names & _DEVICE_TYPES or any(word in words for word in _DEVICE_WORDS):
            return Fault.DEVICE
    cause = error.__cause__
    return classify(cause) if cause is not None else Fault.REQUEST


def require_usable_rank(error: BaseException) -> None:
    """Raise RankFault, which ends this process, if an error is one of the device or of a collective.

    For other errors, even out of memory, return and leave them to the caller.
    """
    fault = classify(error)
    if fault in _GROUP_FAULTS:
        raise RankFault(fault, f"{type(error).__name__}: {error}") from error
