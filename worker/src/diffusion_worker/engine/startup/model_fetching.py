# SPDX-License-Identifier: Apache-2.0
"""The fetch of a model that is not a local folder: before the ranks start, while the server already answers.

The ranks get a fixed path at the server's start, and the fetched model is linked there.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from diffusion_worker.config import WorkerConfig, read_model_index
from diffusion_worker.engine.state.state_document import DesiredModel, ProblemReport
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.sources.fetching import Fetched, Fetcher
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.source import Source

log = logging.getLogger(__name__)

# Pauses between tries of a fetch that may succeed later: a Secret appears, a network comes back.
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0


class ModelFetch:
    """The fetch of one server's model; without effect if the model is a local folder.

    `pinned` returns the version that the model must have by now: the one that another replica found first.
    """

    def __init__(self, config: WorkerConfig, fetcher: Fetcher, pinned: Callable[[], DesiredModel | None]) -> None:
        self.revision: str | None = None
        self.problem: ProblemReport | None = None
        self.progress = (0, 0)
        self._ended = False
        self._config = config
        self._fetcher = fetcher
        self._pinned = pinned

    @property
    def needed(self) -> bool:
        """Return whether the model comes from a source, such as hf://, and not from a local folder."""
        return self._config.model_source is not None

    async def run(self) -> None:
        """Bring the model from its source to the path of `--model`, as a link to the fetched folder; do nothing without a source.

        Errors that may pass are retried, with growing pauses, within the time for a start.

        Raises:
            ConfigError: the last error of the fetch, or the folder has no model.
        """
        if self._config.model_source is None:
            return
        source = parse_source(self._config.model_source)
        ends_at, wait_s = time.monotonic() + self._config.startup_timeout_s, FIRST_RETRY_S
        while True:
            try:
                fetched = await self._fetch(source, ends_at - time.monotonic())
                break
            except RequestError as error:
                # A last try that timed out before any bytes came says less than the error of the try before.
                if error.code != ErrorCode.TIMEOUT or self.problem is None:
                    self.problem = ProblemReport(error.code, error.message, error.retryable)
                if not error.retryable or time.monotonic() + wait_s >= ends_at:
                    raise ConfigError(f"{self.problem.code}: {self.problem.message}") from None
                log.warning("model not fetched code=%s, next try in %g s: %s", error.code, wait_s, error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
        self.problem, self.revision = None, fetched.revision
        self._link(fetched.path)

    async def _fetch(self, source: Source, deadline_s: float) -> Fetched:
        """Fetch the version that is pinned at this try, as the pin may appear or go while an earlier try waits."""
        pinned = self._pinned()
        if pinned is None or pinned.source != source:
            return await self._fetcher.fetch_model(source, deadline_s=deadline_s, report=self._report)
        log.info("model pinned revision=%s digest=%s", pinned.revision, pinned.digest)
        return await self._fetcher.fetch_model(
            source, revision=pinned.revision, digest=pinned.digest, deadline_s=deadline_s, report=self._report
        )

    def end(self) -> None:
        """Remove the link, and let none be made from now on; harmless without one."""
        self._ended = True
        if self.needed:
            with contextlib.suppress(OSError):
                Path(self._config.model).unlink()

    def _report(self, done: int, total: int | None) -> None:
        if done:
            self.problem = None
        self.progress = (done, total or 0)

    def _link(self, folder: str) -> None:
        try:
            read_model_index(folder)
        except ConfigError as error:
            raise ConfigError(f"--model {self._config.model_source}: {error}") from None
        if not self._ended:
            Path(self._config.model).symlink_to(Path(folder).absolute())
