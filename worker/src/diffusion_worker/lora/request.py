# SPDX-License-Identifier: Apache-2.0
"""Which adapter: its name, the id it is registered under in this rank group, and the folder or file it comes from."""

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """One adapter to load. Ids are positive and never used twice in a group's life."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a load beside the adapter: what its file must be, and who may go for it.

    `digest` is that of the weights file, `components` the only ones that are used (none: all that it has), `format` how it
    must be written, `expected_rank` its rank. `evict` are the ids that may be evicted for it, the first ones first; None leaves
    the choice to the manager. Nothing is evicted for an adapter that is refused.
    """

    digest: str | None = None
    components: list[str] = []
    format: str | None = None
    expected_rank: int | None = None
    evict: list[int] | None = None
