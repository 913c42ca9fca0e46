# SPDX-License-Identifier: Apache-2.0
"""A fetcher for tests over fake ranks: paths are taken as they are, other sources come when a test lets them.

Real: the calls of `Fetcher` and how they end. Not real: the files, none of which is there.
"""

import asyncio

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import RequestError
from diffusion_worker.sources.fetching import Fetched, Fetcher, Report
from diffusion_worker.sources.source import Source
from support.worker.fake_rank_group import fake_digest

REMOTE_BYTES = 4096


class FakeFetcher(Fetcher):
    """Remote sources wait for `arriving` halfway; `errors` are raised for a path or repository instead."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.arriving = asyncio.Event()
        self.arriving.set()
        self.errors: dict[str, RequestError] = {}
        # What is wrong with the adapter at a path, as far as that can be told without the ranks.
        self.unread_errors: dict[str, RequestError] = {}
        self.fetches: list[str] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []

    async def fetch_adapter(self, source: Source, *, digest: str | None, deadline_s: float, report: Report, name: str) -> Fetched:
        """A file that need not exist."""
        remote = source.hugging_face.repo if source.hugging_face else None
        place = remote or str(source.path)
        self.fetches.append(place)
        if place in self.errors:
            raise self.errors[place]
        if remote is None:
            return Fetched(place)
        report(REMOTE_BYTES // 2, REMOTE_BYTES)
        try:
            async with asyncio.timeout(deadline_s):
                await self.arriving.wait()
        except asyncio.CancelledError:
            self.cancelled.append(place)
            raise
        report(REMOTE_BYTES, REMOTE_BYTES)
        path = f"/cache/{place}"
        return Fetched(path, fake_digest(path), revision="c0ffee", size_bytes=REMOTE_BYTES)

    async def check_adapter(self, fetched: Fetched, *, digest: str | None, deadline_s: float, name: str) -> Fetched:
        """Nothing is read; `unread_errors` are raised for a path."""
        if fetched.path in self.unread_errors:
            raise self.unread_errors[fetched.path]
        return fetched

    def release(self, fetched: Fetched) -> None:
        """Remember what was given back."""
        self.released.append(fetched.path)
