# SPDX-License-Identifier: Apache-2.0
"""Which adapter: its name, the id it is registered under in this rank group, and the folder or file it comes from."""

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter to load, by an id above 0 that no other load in the life of a rank group has.

    With a `lora_root` nothing outside of that folder is read.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    lora_root: str | None = None


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a load beside the adapter: what its file must be, and who may go for it.

    `digest` is that of the weights file, `identity` that of its effect. Only `components` are used; none stands for all that it
    has. `format` says how it must be written, `expected_rank` its rank. `evict` are the ids that may be evicted for it, the first
    ones first; None leaves the choice to the manager. Nothing is evicted for an adapter that is refused.
    """

    digest: str | None = None
    identity: str | None = None
    components: list[str] = []
    format: str | None = None
    expected_rank: int | None = None
    evict: list[int] | None = None
