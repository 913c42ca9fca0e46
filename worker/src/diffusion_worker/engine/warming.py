# SPDX-License-Identifier: Apache-2.0
"""A request that nobody asked for, run by the ranks before the worker is ready: what is broken or slow the first time is so here."""

import logging
import time

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.admission import GenerationParams, check_size
from diffusion_worker.engine.rank_answers import require_success
from diffusion_worker.engine.rank_group import RankGroup
from diffusion_worker.errors import ConfigError, RequestError
from diffusion_worker.messages import ModelInfo, RpcReply

log = logging.getLogger(__name__)

Features = dict[str, str]


async def warm_up(ranks: RankGroup, config: WorkerConfig, model: ModelInfo) -> Features:
    """Warm the model up in every size that the options name; returns what became of the options, as `ModelInfo.features`.

    Raises:
        RequestError: the model made no image; the message says where and why. GroupFailed: the ranks were lost meanwhile.
    """
    if config.warmup_steps == 0:
        return model.features
    started = time.monotonic()
    replies = await ranks.call("warm_up", timeout_s=config.startup_timeout_s)
    require_success("warm_up", replies)
    log.info("warmed up steps=%d seconds=%.3f", config.warmup_steps, time.monotonic() - started)
    return _agreed(replies)


def check_sizes(config: WorkerConfig, model: ModelInfo) -> None:
    """Whether the sizes to warm up are the model's, by the same rules as for a request; raises ConfigError."""
    for width, height in config.warmup_sizes if config.warmup_steps else []:
        try:
            check_size(GenerationParams(prompt="", width=width, height=height), config.limits, model)
        except RequestError as error:
            raise ConfigError(f"--warmup-size {width}x{height}: {error.message}") from None


def _agreed(replies: list[RpcReply]) -> Features:
    """What rank 0 says, and for what others see otherwise the first of them: a rank that fell back slows all."""
    found = {reply.rank: msgspec.msgpack.decode(reply.result or b"", type=Features) for reply in replies}
    agreed = dict(found[0])
    for rank, features in found.items():
        for option, words in features.items():
            if words != found[0].get(option) and agreed.get(option) == found[0].get(option):
                agreed[option] = f"rank {rank}: {words}"
    return agreed
