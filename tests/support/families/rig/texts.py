# SPDX-License-Identifier: Apache-2.0
"""Tiny text encoders with their tokenizers, for pipelines that are asked with a prompt.

Real: the classes of transformers and tokenizers. Not real: the weights, which are random, and the eleven words they know.
"""

from typing import Any

import tokenizers
import transformers

# Every other word is the unknown one.
WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "blue", "cat", "dog", "runs", "sleeps", "blurred")


def tiny_tokenizer() -> Any:
    """Splits at blanks and knows `WORDS`; a text ends with </s>."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def tiny_umt5(width: int) -> Any:
    """A text encoder of one layer that makes `width` numbers a token."""
    config = transformers.UMT5Config(
        vocab_size=len(WORDS), d_model=width, d_kv=width // 2, d_ff=width, num_layers=1, num_heads=2, relative_attention_num_buckets=8
    )
    return transformers.UMT5EncoderModel(config)
