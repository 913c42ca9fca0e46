# SPDX-License-Identifier: Apache-2.0
"""The program `diffusion-worker` over `FakeRankGroup`.

Real: the server, its ports, signals and exit codes. Not real: the ranks, so there is no torch.

`FAKE_WORKER` in the environment is a JSON object with the ranks' behaviour: `loadSeconds`, `stepSeconds`, `configError`, `dieAfterSeconds`,
`hangAtStop`, `sleepSeconds`, `wakeSeconds`, and `wakeErrors`. The last one has the codes with which the next wakes fail. The name of an
adapter's folder decides over its load: ranks refuse a name in `REFUSED`, and `slow` takes forever. The ranks keep as many adapters as the
options say.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from diffusion_worker import cli
from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, ModelInfo, RpcReply
from diffusion_worker.ranks import executor
from support.worker.fake_rank_group import FakeRankGroup

BEHAVIOUR = json.loads(os.environ.get("FAKE_WORKER", "{}"))
REFUSED = {
    "broken": (ErrorCode.INVALID_ADAPTER, "no adapter_config.json"),
    "too-wide": (ErrorCode.RANK_TOO_LARGE, "rank 128, at most 64"),
    "elsewhere": (ErrorCode.MODULES_OUTSIDE_ENVELOPE, "changes norm_out.linear"),
    "crowded": (ErrorCode.INSUFFICIENT_MEMORY, "no room"),
}
# The fields with the duration of a method.
SECONDS = {"handle_sleep_task": "sleepSeconds", "handle_wake_task": "wakeSeconds"}


class ScriptedRankGroup(FakeRankGroup):
    """A fake group with scripted faults, since a test in another process cannot call its methods."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config.ranks, config_error=BEHAVIOUR.get("configError"), step_s=BEHAVIOUR.get("stepSeconds", 0.0))
        self.max_cached = config.max_cached_loras
        self.wake_errors += [ErrorReport(ErrorCode(code), f"told to fail with {code}") for code in BEHAVIOUR.get("wakeErrors", [])]

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        if "dieAfterSeconds" in BEHAVIOUR:
            asyncio.get_running_loop().call_later(BEHAVIOUR["dieAfterSeconds"], self.lose, "rank 0 was ended by SIGKILL")
        await asyncio.sleep(BEHAVIOUR.get("loadSeconds", 0.0))
        return await super().start(asleep=asleep)

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> list[RpcReply]:
        await asyncio.sleep(BEHAVIOUR.get(SECONDS.get(method, ""), 0.0))
        path = kwargs.get("request", {}).get("lora_path", "")
        if (name := Path(path).name) in REFUSED:
            code, why = REFUSED[name]
            self.adapter_errors[path] = ErrorReport(code, f"adapter folder {path!r}: {why}")
        (self.calling.clear if path.endswith("/slow") else self.calling.set)()
        return await super().call(method, timeout_s=timeout_s, **kwargs)

    async def stop(self) -> None:
        if BEHAVIOUR.get("hangAtStop"):
            time.sleep(600)  # noqa: ASYNC251 (the fault: the whole event loop is blocked)
        await super().stop()


if __name__ == "__main__":
    executor.RankExecutor = ScriptedRankGroup  # type: ignore[assignment,misc]
    cli.main()
