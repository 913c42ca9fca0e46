# SPDX-License-Identifier: Apache-2.0
"""Preparation of ranks before they serve: after their load, and again after each sleep."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from diffusion_worker.compatibility import sleep_blocker
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters.declared import DeclaredAdapters
from diffusion_worker.engine.adapters.runner import AdapterRunner
from diffusion_worker.engine.requests.admission import GenerationParams, check_size
from diffusion_worker.engine.startup.wake_verification import Verification
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.engine.state.state_document import LoadStage
from diffusion_worker.errors import ConfigError, ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import ModelInfo, RpcReply, WarmedUp

log = logging.getLogger(__name__)

# Parts of the wake's remaining time by which fetches of newly desired adapters, and then their loads, must be over. The rest is for the
# verification, so that a source that stalls cannot fail the wake.
FOLLOW_SHARE = 0.5
APPLY_SHARE = 0.75


class Preparation:
    """The preparation of each generation of ranks. `describe` is called with each model, `warmed` with each warm-up.

    `wants_mirrors` returns whether ranks that have loaded shall mirror their weights in host memory. Otherwise the first sleep does it.
    """

    def __init__(
        self,
        config: WorkerConfig,
        life: EngineLife,
        call_all: CallAll,
        declared: DeclaredAdapters,
        adapters: AdapterRunner,
        verification: Verification,
        *,
        describe: Callable[[ModelInfo], None],
        warmed: Callable[[WarmedUp], None],
        wants_mirrors: Callable[[], bool],
    ) -> None:
        self._config = config
        self._life = life
        self._call_all = call_all
        self._declared = declared
        self._adapters = adapters
        self._verification = verification
        self._describe = describe
        self._warmed = warmed
        self._wants_mirrors = wants_mirrors
        self._model: ModelInfo | None = None
        # Set once this generation has run a request.
        self._warm = False

    async def begin(self, model: ModelInfo, *, asleep: bool) -> None:
        """Prepare a generation that has started.

        An awake one is warmed up. If it can sleep, its fingerprints become the reference for later ones, and its weights are mirrored if
        wanted. A generation started asleep holds nothing; its first wake warms it up.

        Raises:
            ConfigError: the model cannot make a size, or makes no image. GroupFailed.
        """
        self._model, self._warm = model, False
        check_sizes(self._config, model)
        self._describe(model)
        for item in model.merging:
            if not item.merged:
                log.info("calls run alone component=%s model=%s method=%s why=%s", item.component, item.model, item.method, item.why)
        if asleep:
            self._warmed(WarmedUp(model.features))
            return
        self._life.stage = LoadStage.WARMUP
        try:
            await self._warm_up()
        except RequestError as error:
            own = ", ".join(f"--dtype {name}={dtype}" for name, dtype in self._config.component_dtypes.items())
            hint = f"; {own}: the pipeline has to convert what it gives to this component" if own else ""
            message = (
                f"the warm-up before the first request failed: {error.code}: {error.message} (--warmup-steps 0 starts without it{hint})"
            )
            raise ConfigError(message) from None
        if sleep_blocker(self._config) is not None:
            return  # it never sleeps, and its weights may be in memory that cannot be read
        try:
            await self._verification.record(timeout_s=self._config.startup_timeout_s)
        except RequestError as error:
            raise GroupFailed(f"the fingerprints of the loaded ranks cannot be taken: {error.message}") from None
        if self._wants_mirrors():
            await self._mirror()

    async def _mirror(self) -> None:
        """Have the ranks mirror their weights. A model that has no room for that serves, and its first sleep tries again."""
        try:
            await self._call_all("mirror_weights", timeout_s=self._config.startup_timeout_s)
        except RequestError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise GroupFailed(f"the weights of the loaded ranks cannot be mirrored in host memory: {error.message}") from None
            log.warning("the weights are not mirrored in host memory before the first sleep: %s", error.message)

    def discarded(self) -> None:
        """Mark all adapters as gone from the ranks: the next wake loads them, except those on demand, which their requests load."""
        self._adapters.ranks_emptied()

    async def after_wake(self, until_s: float) -> None:
        """Complete a wake whose weights are back: warm up, load adapters, and verify all. `until_s` is on the event loop's clock.

        Raises:
            RequestError: VerificationFailed, Timeout, InsufficientMemory, RankFailed: the model must not serve. GroupFailed.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s):
                if not self._warm:
                    await self._warm_up()
                began_s = loop.time()
                left_s = max(0.001, until_s - began_s)
                await self._declared.follow(FOLLOW_SHARE * left_s)
                await self._adapters.apply_deferred(began_s + APPLY_SHARE * left_s)
        except TimeoutError:
            raise RequestError(
                ErrorCode.TIMEOUT, "wake: expected the warm-up and the loads of adapters to end within its deadline"
            ) from None
        await self._verification.verify(timeout_s=max(0.001, until_s - loop.time()))

    async def _warm_up(self) -> None:
        assert self._model is not None, "a generation begins with its model"
        self._warmed(await warm_up(self._call_all, self._config, self._model))
        self._warm = True


async def warm_up(call_all: CallAll, config: WorkerConfig, model: ModelInfo) -> WarmedUp:
    """Have all ranks warm the model up in every size of the options; return the outcome of the options, and what ticks took.

    With `--warmup-steps 0` no rank is called.

    Raises:
        RequestError: the model made no image; the message names the size and the reason. GroupFailed: the ranks were lost meanwhile.
    """
    if config.warmup_steps == 0:
        return WarmedUp(model.features)
    started = time.monotonic()
    replies = await call_all("warm_up", timeout_s=config.startup_timeout_s)
    log.info("warmed up steps=%d seconds=%.3f", config.warmup_steps, time.monotonic() - started)
    return _agreed(replies)


def check_sizes(config: WorkerConfig, model: ModelInfo) -> None:
    """Hold each `--warmup-size` to the limits of requests, if there is a warm-up.

    Raises:
        ConfigError: a size is over a limit, or the model cannot make it; names the option and the size.
    """
    for width, height in config.warmup_sizes if config.warmup_steps else []:
        try:
            check_size(GenerationParams(prompt="", width=width, height=height), config.limits, model)
        except RequestError as error:
            raise ConfigError(f"--warmup-size {width}x{height}: {error.message}") from None


def _agreed(replies: list[RpcReply]) -> WarmedUp:
    """Return the report of rank 0, but for an option in which others differ, the words of the first of them with its rank."""
    found = {reply.rank: msgspec.msgpack.decode(reply.result or b"", type=WarmedUp) for reply in replies}
    first = found[0].features
    agreed = dict(first)
    for rank, report in found.items():
        for option, words in report.features.items():
            if words != first.get(option) and agreed.get(option) == first.get(option):
                agreed[option] = f"rank {rank}: {words}"
    return WarmedUp(agreed, found[0].ticks)
