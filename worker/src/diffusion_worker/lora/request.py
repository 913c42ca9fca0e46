# SPDX-License-Identifier: Apache-2.0
"""Which adapter: its name, the id it was loaded under in this rank group, and the folder it comes from."""

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """One adapter to load. Ids are positive and never used twice in a group's life."""

    lora_name: str
    lora_int_id: int
    lora_path: str
