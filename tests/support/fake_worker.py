# SPDX-License-Identifier: Apache-2.0
"""The program `diffusion-worker` over `FakeRankGroup`: the real server, ports, signals and exit codes, without torch.

`FAKE_WORKER` in the environment is a JSON object that says how the ranks behave: `loadSeconds`, `stepSeconds`, `configError`,
`dieAfterSeconds`, `hangAtStop`. An adapter from a folder named `broken` is refused by the ranks, one from `slow` takes forever.
"""

import asyncio
import json
import os
import time

from diffusion_worker import cli
from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, ModelInfo, RpcReply
from diffusion_worker.ranks import executor
from fake_rank_group import FakeRankGroup

BEHAVIOUR = json.loads(os.environ.get("FAKE_WORKER", "{}"))


class ScriptedRankGroup(FakeRankGroup):
    """A fake group that does by itself what a test in another process cannot make it do."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config.ranks, config_error=BEHAVIOUR.get("configError"), step_s=BEHAVIOUR.get("stepSeconds", 0.0))

    async def start(self) -> ModelInfo:
        """Load, slowly if told so."""
        if "dieAfterSeconds" in BEHAVIOUR:
            asyncio.get_running_loop().call_later(BEHAVIOUR["dieAfterSeconds"], self.die, "rank 0 was ended by SIGKILL")
        await asyncio.sleep(BEHAVIOUR.get("loadSeconds", 0.0))
        return await super().start()

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method; the folder of an adapter decides how its load goes."""
        path = str(getattr(kwargs.get("request"), "lora_path", None) or dict(_fields(kwargs.get("request"))).get("lora_path", ""))
        if path.endswith("/broken"):
            self.adapter_errors[path] = ErrorReport(ErrorCode.INVALID_ADAPTER, f"adapter folder {path!r}: no adapter_config.json")
        (self.calling.clear if path.endswith("/slow") else self.calling.set)()
        return await super().call(method, timeout_s=timeout_s, **kwargs)

    async def stop(self) -> None:
        """End; or block the whole event loop, as a fault of ours could."""
        if BEHAVIOUR.get("hangAtStop"):
            time.sleep(600)  # noqa: ASYNC251 (that is the fault)
        await super().stop()


def _fields(request: object) -> dict[str, object]:
    return request if isinstance(request, dict) else {}


if __name__ == "__main__":
    executor.RankExecutor = ScriptedRankGroup  # type: ignore[assignment,misc]
    cli.main()
