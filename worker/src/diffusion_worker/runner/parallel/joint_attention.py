# SPDX-License-Identifier: Apache-2.0
"""The joint attention of SD3 with an image's tokens split over ranks, in place of diffusers' own processor.

Every rank has all text tokens and its part of the image's, and computes the attention of its part of the heads. A first exchange
distributes queries, keys and values by heads; further ones return the results of the image and the text.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional


class SplitJointAttention:
    """An attention processor; shapes inside are [rows, tokens, heads, width]."""

    # Diffusers' attribute by which a processor shows that it supports attention over several ranks.
    _parallel_config: Any = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._index = dist.get_rank(group)

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None, **others: Any) -> Any:
        """Compute the attention of `hidden_states` [rows, tokens, channels]; return it alone, or with the text's if there is text.

        Raises:
            ValueError: another argument is given, such as a mask or an IP adapter's.
        """
        if unsupported := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"attention over tokens that are split over ranks does not support {', '.join(unsupported)}")
        image = self._to_heads(_project(attn, hidden_states, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")))
        length = image.shape[2]
        if encoder_hidden_states is None:
            return _out(attn, self._to_tokens(_attend(image)))
        text = _project(attn, encoder_hidden_states, ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k"))
        both = _attend(torch.cat([image, text.tensor_split(self._size, dim=3)[self._index]], dim=2))
        result = _out(attn, self._to_tokens(both[:, :length]))
        # The last block has no use for the text.
        return result, encoder_hidden_states if attn.context_pre_only else attn.to_add_out(self._all_heads(both[:, length:]).flatten(2))

    def _to_heads(self, mine: torch.Tensor) -> torch.Tensor:
        """Swap the split by one all-to-all, from all heads of some tokens to all tokens of some heads.

        Dimension 2 has tokens, 3 has heads.
        """
        parts = torch.stack(mine.chunk(self._size, dim=3))
        return torch.cat(list(self._exchange(parts)), dim=2)

    def _to_tokens(self, mine: torch.Tensor) -> torch.Tensor:
        """Return an attention's result to the ranks of its tokens: from all tokens of some heads to all heads of this rank's tokens."""
        parts = torch.stack(mine.chunk(self._size, dim=1))
        return torch.cat(list(self._exchange(parts)), dim=2)

    def _all_heads(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather the heads that the other ranks computed, in rank order, so that dimension 2 of the result has every head."""
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self._size)]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return torch.cat(parts, dim=2)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part i to rank i of the group; return the parts received, part i from rank i."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received


def _project(attn: Any, states: torch.Tensor, linears: tuple[str, str, str], norms: tuple[str, str]) -> torch.Tensor:
    """Apply three linear layers, and the norms of query and key if there are any.

    The results are stacked in front of [rows, tokens, heads, width].
    """
    query, key, value = (getattr(attn, name)(states).unflatten(-1, (attn.heads, -1)) for name in linears)
    norm_query, norm_key = (getattr(attn, name) for name in norms)
    query = query if norm_query is None else norm_query(query)
    key = key if norm_key is None else norm_key(key)
    return torch.stack([query, key, value])


def _attend(projected: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in projected)
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _out(attn: Any, attended: torch.Tensor) -> Any:
    return attn.to_out[1](attn.to_out[0](attended.flatten(2)))
