# SPDX-License-Identifier: Apache-2.0
"""A tiny text encoder and a tokenizer, for pipelines that take prompts in words.

Real: the classes of transformers and tokenizers. Not real: the weights, which are random, and the tokens, which are letters.
"""

from typing import Any

import tokenizers
import transformers


def letters() -> Any:
    """Build a tokenizer that splits text into characters.

    Printable ASCII and line feeds have tokens of their own, and all else is `<unk>`.
    """
    characters = ["<pad>", "<s>", "<unk>", "\n", *map(chr, range(32, 127))]
    model = tokenizers.models.WordLevel({character: number for number, character in enumerate(characters)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>")


def tiny_umt5(width: int) -> Any:
    """Build a UMT5 encoder with random weights in a single layer; its hidden states have `width` channels."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_sizes(width)))


def tiny_mt5(width: int) -> Any:
    """Build an mT5 text encoder of one layer that makes `width` numbers a token."""
    return transformers.MT5EncoderModel(transformers.MT5Config(**_t5_sizes(width)))


def _t5_sizes(width: int) -> dict[str, int]:
    heads = {"d_kv": width // 2, "num_heads": 2, "relative_attention_num_buckets": 8}
    return {"vocab_size": 128, "d_model": width, "d_ff": width, "num_layers": 1, **heads}
