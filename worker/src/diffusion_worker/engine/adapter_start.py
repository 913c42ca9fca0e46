# SPDX-License-Identifier: Apache-2.0
"""The adapters that a server has from its start: those of its options and those of the desired file."""

import asyncio
import logging

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapter_loading import AdapterLoader
from diffusion_worker.engine.documents import AdapterCall, DesiredAdapter, DesiredState, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.parsing import parse_source

log = logging.getLogger(__name__)

# Sources that are asked side by side.
FETCHES = 4


async def load_at_start(loader: AdapterLoader, config: WorkerConfig, desired: DesiredState) -> None:
    """Try every adapter once; one that fails is kept as Failed and keeps nothing else from serving.

    Where there are more than fit in memory, the most wanted ones come last and so are there in the end.

    Raises:
        ConfigError: an option's source cannot be read.
    """
    calls = [(name, _call(config, source)) for name, source in config.preload_loras.items()]
    calls += [(wanted.name, _desired_call(wanted)) for wanted in desired.adapters]
    for name, _ in calls:
        if name == config.served_name:
            log.error("adapter=%s not loaded code=%s: the name is that of the base model", name, ErrorCode.CONFLICT)
    calls = [(name, call) for name, call in calls if name != config.served_name]
    calls.sort(key=lambda each: (each[1].residency is Residency.RESIDENT, each[1].priority))
    turns = asyncio.Semaphore(FETCHES)

    async def load(name: str, call: AdapterCall) -> None:
        async with turns:
            try:
                await loader.put(name, call)
            except RequestError as error:
                log.error("adapter=%s not loaded code=%s: %s", name, error.code, error.message)

    await asyncio.gather(*(load(name, call) for name, call in calls))


def _call(config: WorkerConfig, source: str) -> AdapterCall:
    return AdapterCall(operation_id="start", source=parse_source(source), deadline_seconds=config.lora_load_timeout_s)


def _desired_call(wanted: DesiredAdapter) -> AdapterCall:
    return AdapterCall(
        operation_id="start",
        source=wanted.source,
        digest=wanted.digest,
        scale=wanted.scale,
        components=wanted.components,
        format=wanted.format,
        expected_rank=wanted.expected_rank,
        residency=wanted.residency,
        priority=wanted.priority,
        deadline_seconds=wanted.load_timeout_seconds,
    )
