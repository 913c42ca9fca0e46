# SPDX-License-Identifier: Apache-2.0
"""Leases of other releases: the objects of one that has expired may be taken over."""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from diffusion_operator.api.names import LEASE
from diffusion_operator.election.lease import Leases, Manifest, read_lease
from diffusion_operator.election.state import Timing
from diffusion_operator.errors import ClusterError

ASK_EVERY_S = 5.0
EXPIRES_S = Timing().lease
RELEASE = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9.-]{0,252})")

log = logging.getLogger(__name__)


@dataclass
class _Asked:
    """The Lease of another release, as it was read."""

    at: float
    record: object = None
    since: float = 0.0
    duration_s: float = EXPIRES_S
    error: str = ""


class OtherReleases:
    """Leases of other releases, watched by this process's own clock from its first question about each."""

    def __init__(self, leases: Leases, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._clock = clock
        self._asked: dict[str, _Asked] = {}

    async def has_expired(self, release: str) -> bool:
        """Return whether a release's Lease stayed unchanged, or missing, for its duration since this process first asked; at least 15 s.

        So the first answer is False, as for a Lease that may not be read. The API server is asked every 5 s at most.
        """
        found, now = self._asked.get(release), self._clock()
        if found is None or now - found.at >= ASK_EVERY_S:
            found = await self._ask(release, found or _Asked(at=now, since=now))
        return not found.error and found.at - found.since >= found.duration_s

    async def _ask(self, release: str, asked: _Asked) -> _Asked:
        asked.at, before = self._clock(), asked.error
        self._asked[release] = asked
        try:
            lease = read_lease(await self._read(release))
        except ClusterError as error:
            asked.error, asked.since = str(error), asked.at
            if asked.error != before:
                log.warning(
                    "the lease of another release cannot be read, so its objects are left alone release=%s error=%s: "
                    "docs/operations.md says how to take over",
                    release,
                    error,
                )
            return asked
        record = lease.record if lease is not None else None
        asked.error, asked.duration_s = "", max(EXPIRES_S, lease.duration_s if lease is not None else 0.0)
        if record != asked.record or before:
            asked.record, asked.since = record, asked.at
        return asked

    async def _read(self, release: str) -> Manifest | None:
        """Read a release's Lease; None if it is missing, or if the release's name is malformed.

        The name is checked first, because it comes from a status.
        """
        name = RELEASE.fullmatch(release)
        return await self._leases.get(LEASE, name[1], name[2]) if name is not None else None
