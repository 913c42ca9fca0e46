# SPDX-License-Identifier: Apache-2.0
"""The verification of merged calls while the worker is idle, in steps with room for requests between any two.

The verdicts come from here alone: all ranks get the same ones at the same place between their steps.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.startup.merge_verdicts import KeptVerdicts, abandoned, agreed
from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.engine.state.revision import Signal
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import MergeVerdict, ModelInfo, ModelMerging

log = logging.getLogger(__name__)

T = TypeVar("T")

# The work of a verification, without the time in which requests ran. It is enough for some hundred steps of a small image.
LIMIT_S = 120.0
# The pause between two looks for an idle worker, as the end of a request gives no signal.
LOOK_S = 0.5
# The ranks sleep, or are about to: the verification begins again after the wake.
LATER = frozenset({ErrorCode.ASLEEP, ErrorCode.BUSY})


class MergeVerification:
    """The verification of one engine's model, and its outcome in `merging`.

    `idle` returns whether the ranks serve and have nothing else to do, `version` the worker's version.
    """

    def __init__(
        self, config: WorkerConfig, call_all: CallAll, signal: Signal, *, idle: Callable[[], bool], version: Callable[[], str]
    ) -> None:
        # For each method of each component: if its calls are merged, and why.
        self.merging: list[ModelMerging] = []
        self._config = config
        self._call_all = call_all
        self._signal = signal
        self._idle = idle
        self._version = version
        self._model: ModelInfo | None = None
        self._verdicts: list[MergeVerdict] = []
        self._spent_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def describe(self, model: ModelInfo) -> None:
        """Take the description of ranks that have just loaded, and give them the verdicts that are known.

        Raises:
            GroupFailed: the ranks are lost, or one of them cannot use the verdicts.
        """
        self._model, self.merging = model, model.merging
        if self._verdicts:
            try:
                await self._use(self._verdicts)
            except RequestError as error:
                raise GroupFailed(f"the ranks cannot use the verdicts on merged model calls: {error.message}") from None
        else:
            self._tell(self.merging)

    def begin(self, digest: "asyncio.Future[str | None]") -> None:
        """Verify in the background, once the model's digest is known or is known not to come; no effect if there is nothing to verify."""
        if self._open:
            self._task = asyncio.create_task(self._run(digest))

    def end(self) -> None:
        """Stop verifying; harmless if nothing runs."""
        if self._task is not None:
            self._task.cancel()

    @property
    def _open(self) -> bool:
        return any(item.to_verify for item in self.merging)

    async def _run(self, digest: "asyncio.Future[str | None]") -> None:
        try:
            # Others wait for the digest too, so the end of this task must not cancel it.
            kept = self._kept(await asyncio.shield(digest))
            if found := kept.read():
                await self._when_idle(lambda: self._use(found))
                log.info("verdicts on merging of an earlier run are used")
            if self._open:
                await self._verify(kept)
        except Exception:
            log.exception("the verification of merged calls failed unexpectedly; calls that are not verified are not merged")

    def _kept(self, digest: str | None) -> KeptVerdicts:
        assert self._model is not None
        # Without a digest nobody can say for which weights a verdict holds.
        folder = self._config.cache_dir if digest is not None else None
        dtypes = sorted(f"{name}={dtype}" for name, dtype in self._config.component_dtypes.items())
        return KeptVerdicts(folder, digest or "", self._version(), self._model.platform, self._model.dtype, *dtypes)

    async def _verify(self, kept: KeptVerdicts) -> None:
        verdicts, why = await self._outcome()
        if why:
            log.warning("not all merged calls could be verified, and the others are not merged: %s", why)
            known = await self._when_idle(lambda: self._step(more=False))
            verdicts = abandoned(known or [], why)
        log.info("merging verified seconds=%.1f", self._spent_s)
        await self._when_idle(lambda: self._use(self._verdicts + verdicts))
        if not why:
            kept.write(self._verdicts)

    async def _outcome(self) -> tuple[list[MergeVerdict], str]:
        """Verify step by step; return the verdicts, or the reason why there will be no more of them."""
        while self._spent_s <= LIMIT_S:
            try:
                verdicts = await self._when_idle(lambda: self._step(more=True))
            except GroupFailed as error:
                return [], f"the ranks were lost during the verification: {error}"
            except RequestError as error:
                if error.code in LATER:
                    continue
                return [], f"the verification failed: {error.message}"
            if verdicts is not None:
                return verdicts, ""
        return [], f"the verification took longer than {LIMIT_S:.0f} s"

    async def _when_idle(self, call: Callable[[], Awaitable[T]]) -> T:
        """Wait until the ranks serve and have nothing to do, and make a call to them; its seconds count as spent."""
        while not self._idle():
            await self._signal.wait(LOOK_S)
        began_s = asyncio.get_running_loop().time()
        try:
            return await call()
        finally:
            self._spent_s += asyncio.get_running_loop().time() - began_s

    async def _step(self, *, more: bool) -> list[MergeVerdict] | None:
        """Let all ranks take a step of the verification; return the verdicts at its end, None before it. Without `more` it ends now."""
        replies = await self._call_all("verify_merging", timeout_s=self._config.rank_timeout_s, more=more)
        found = [msgspec.msgpack.decode(reply.result or b"", type=list[MergeVerdict] | None) for reply in replies]
        done = [verdicts for verdicts in found if verdicts is not None]
        return agreed(done) if len(done) == len(found) else None

    async def _use(self, verdicts: Sequence[MergeVerdict]) -> None:
        self._verdicts = list(verdicts)
        replies = await self._call_all("use_merging", timeout_s=self._config.rank_timeout_s, verdicts=self._verdicts)
        merging = msgspec.msgpack.decode(replies[0].result or b"", type=list[ModelMerging])
        self._tell([item for item in merging if item not in self.merging])
        self.merging = merging
        self._signal.notify()

    def _tell(self, merging: Sequence[ModelMerging]) -> None:
        for item in merging:
            log.info(
                "merging component=%s model=%s method=%s basis=%s why=%s", item.component, item.model, item.method, item.basis, item.why
            )
