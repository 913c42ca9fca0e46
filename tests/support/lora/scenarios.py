# SPDX-License-Identifier: Apache-2.0
"""Scenarios of adapters on several ranks. Real: the processes, their group and the manager. Not real: the model, which is one layer."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_worker.errors import RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.runner.loading.adapter_layers import add_on_all_ranks
from support.lora.peft_adapters import write_adapter
from support.runner.rank_processes import Rank


def one_rank_cannot_load(rank: Rank) -> list[dict[str, Any]]:
    """Adapters for a full memory: one that rank 1 does not find, one of which it reads other bytes, and a good one."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 4)
    loras = DiffusionLoRAManager(
        {"transformer": nn.Sequential(linear)}, denoiser="transformer", slots=1, cached=1, max_rank=4, device=torch.device("cpu")
    )
    found = []
    with tempfile.TemporaryDirectory() as folder, rank.group() as parallel:
        for number, name in enumerate(["first", "missing", "changed", "good"], start=1):
            path = Path(folder) / name
            path.mkdir()
            write_adapter(path, {"0": linear}, seed=rank.rank if name == "changed" else number)
            if name == "missing" and rank.rank == 1:
                shutil.rmtree(path)
            said, code, evicted = "", "", []
            try:
                evicted = add_on_all_ranks(loras, parallel, LoRARequest(name, number, str(path)), LoadOptions(evict=[1])).evicted
            except RequestError as error:
                said, code = error.message.replace(folder, ""), str(error.code)
            found.append({"said": said, "code": code, "evicted": evicted, "listed": loras.list_adapters()})
    return found
