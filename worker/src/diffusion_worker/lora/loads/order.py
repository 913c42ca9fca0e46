# SPDX-License-Identifier: Apache-2.0
"""The order that a server gives to the process of a load, and the answer. Without torch."""

import msgspec

from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import ErrorReport, PreparedPart


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a load: for each kind of rank an encoded `ModelTable`, its ranks, and the path of the memory for it."""

    request: LoRARequest
    options: LoadOptions
    tables: list[bytes]
    ranks: list[list[int]]
    memories: list[str]
    deadline_s: float


class LoadOutcome(msgspec.Struct, frozen=True):
    """The prepared parts, in the order of the order's tables; or the error of the load, and then no parts."""

    parts: list[PreparedPart] = []
    error: ErrorReport | None = None
