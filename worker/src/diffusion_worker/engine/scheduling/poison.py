# SPDX-License-Identifier: Apache-2.0
"""Contents of requests that lost the ranks twice, the second time alone. Their like is refused for a while. Pure.

Every request on the ranks at a loss is a suspect, and is made again with no other beside it. Innocent ones finish. A loss during such a run
shows the guilty one, and explains the loss before it as well.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from diffusion_worker.messages import RequestSpec
from diffusion_worker.recent import Recent

REFUSED_S = 600.0
# Contents that are remembered; the oldest are forgotten first.
REMEMBERED = 1024
# Requests that may be found guilty in a row, with no image made between them. After more the ranks themselves are suspect.
MOST_IN_A_ROW = 5


def content_of(spec: RequestSpec, frames: Sequence[bytes | memoryview]) -> bytes:
    """Return a digest of a request's parameters and input images.

    Id, seed and `whole` do not count, so a client that repeats the request without a seed is recognized.
    """
    digest = hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(spec, request_id="", seed=0, whole=False)))
    for frame in frames:
        digest.update(hashlib.sha256(frame).digest())
    return digest.digest()


class Poisons:
    """The digests of contents that are refused, each until a time, and the number of contents condemned since the last image made."""

    def __init__(self) -> None:
        self._until_s: Recent[bytes, float] = Recent(REMEMBERED)
        self._in_a_row = 0

    def __bool__(self) -> bool:
        """Return whether any content is or was refused; the digest of a request is needed only then."""
        return bool(self._until_s)

    def condemn(self, content: bytes, now_s: float) -> bool:
        """Refuse a content for `REFUSED_S` seconds; return whether it explains the losses.

        It does not once more than `MOST_IN_A_ROW` contents were condemned with no image made between them.
        """
        self._until_s[content] = now_s + REFUSED_S
        self._in_a_row += 1
        return self._in_a_row <= MOST_IN_A_ROW

    def image_made(self) -> None:
        """Record that the ranks made an image, so they are not to blame for every loss."""
        self._in_a_row = 0

    def refused_for_s(self, content: bytes, now_s: float) -> float:
        """Return the seconds for which a content is still refused; 0 if it is not."""
        left_s = self._until_s.get(content, now_s) - now_s
        if left_s <= 0:
            self._until_s.pop(content, None)
        return max(0.0, left_s)
