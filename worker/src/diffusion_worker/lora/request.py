# SPDX-License-Identifier: Apache-2.0
"""Requests for adapters: a name, the id in this rank group, the folder or file, and the options of the load."""

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter to load, by an id above 0 that no other load in the life of a rank group has.

    With a `lora_root` nothing outside that folder is read.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    lora_root: str | None = None


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a load: requirements on the adapter, and the adapters that may be evicted for it.

    `digest` is the required digest of the weights file, `identity` that of the effect; `format` and `expected_rank` are required
    too if set. Only `components` are used; none means all that the adapter has. `evict` lists the ids that may be evicted, in
    this order; None leaves the choice to the manager. Nothing is evicted for an adapter that is refused.
    """

    digest: str | None = None
    identity: str | None = None
    components: list[str] = []
    format: str | None = None
    expected_rank: int | None = None
    evict: list[int] | None = None
