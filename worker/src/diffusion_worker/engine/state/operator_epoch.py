# SPDX-License-Identifier: Apache-2.0
"""The operator's leaders as a worker knows them: by a number that rises with each.

A replaced leader may not know yet that it is replaced, or may have been stopped for a minute. The API server cannot tell its calls from
its successor's, so the worker does. The number lives as long as the server process, so data that an operator lost can never lock it out.
"""

from diffusion_worker.errors import ErrorCode, RequestError


class OperatorEpoch:
    """The highest epoch that a call carried; 0 before the first."""

    def __init__(self) -> None:
        self.highest = 0

    def admit(self, epoch: int) -> None:
        """Take the epoch of a call that changes something; raise RequestError (StaleEpoch) if it is lower than the highest."""
        if epoch < self.highest:
            message = f"X-Operator-Epoch: expected {self.highest} or more, found {epoch}: another operator leads"
            raise RequestError(ErrorCode.STALE_EPOCH, message)
        self.highest = epoch

    def see(self, epoch: int) -> None:
        """Take the epoch of a call that only reads. It is served in any case, and shows the highest epoch to a leader that lost count."""
        self.highest = max(self.highest, epoch)
