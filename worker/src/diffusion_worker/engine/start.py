# SPDX-License-Identifier: Apache-2.0
"""The start of an engine into a model that serves, or that sleeps: by its policy, or because the last server here ended asleep."""

import asyncio

from diffusion_worker.compatibility import sleep_blocker
from diffusion_worker.engine.construction import EngineParts
from diffusion_worker.engine.sleep.record import SleepRecord
from diffusion_worker.engine.state.state_document import EngineState, LoadStage, SleepCall, SleepPolicy


async def start(parts: EngineParts) -> None:
    """Fetch the model if it has a source, start the ranks, and load adapters in the time that is left.

    Adapters that come too late do not fail the start. It ends with a serving model, or with a sleeping one: by policy, or because it slept
    when the last server ended.

    Raises:
        ConfigError: an option or the model is wrong. GroupFailed: the ranks did not come up.
    """
    until_s = asyncio.get_running_loop().time() + parts.config.startup_timeout_s
    if parts.model_fetch.needed:
        parts.life.stage = LoadStage.FETCHING
        await parts.model_fetch.run()
        parts.life.stage = LoadStage.STARTING_RANKS
    if (record := _record(parts)) is not None:
        await _start_asleep(parts, record, until_s)
    else:
        await _start_awake(parts, until_s)


def _record(parts: EngineParts) -> SleepRecord | None:
    """Return the last server's record if the policy and the options let the model sleep; else remove it and return None."""
    wanted = parts.rules.policy is not SleepPolicy.ALWAYS_AWAKE and sleep_blocker(parts.config) is None
    record = parts.notes.read() if wanted else None
    if record is None:
        parts.notes.remove()
    return record


async def _start_asleep(parts: EngineParts, record: SleepRecord, until_s: float) -> None:
    """Start the ranks without weights until the first wake, which may begin while adapters are still fetched."""
    parts.verification.recorded = record.fingerprints
    await parts.preparation.begin(await parts.ranks.start(asleep=True), asleep=True)
    parts.life.enter(EngineState.ASLEEP)
    parts.supervisor.begin()
    await _load_adapters(parts, until_s)


async def _start_awake(parts: EngineParts, until_s: float) -> None:
    """Start and load the ranks; under policy Asleep then put them to sleep, so that the sleeping model is known to work."""
    await parts.preparation.begin(await parts.ranks.start(), asleep=False)
    await _load_adapters(parts, until_s)
    parts.life.enter(EngineState.READY)
    parts.supervisor.begin()
    if parts.rules.policy is SleepPolicy.ASLEEP:
        call = SleepCall(operation_id="policy-1", level=parts.rules.sleep.level)
        parts.sleep_calls.sleep(call)
        await parts.operations.over(call.operation_id)


async def _load_adapters(parts: EngineParts, until_s: float) -> None:
    """Load adapters in the time left for the start, so that a source that stalls cannot fail it."""
    parts.life.stage = LoadStage.LOADING_ADAPTERS
    await parts.declared.load_at_start(max(0.0, until_s - asyncio.get_running_loop().time()))
    parts.life.stage = LoadStage.DONE
