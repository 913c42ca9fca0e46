# SPDX-License-Identifier: Apache-2.0
"""Prompts of 300 random words, encoded by a tiny pipeline of each family of text encoder, in a process whose logs are a rank's.

Real: the pipelines, the runner and the logging. Not real: the weights, which are few and random. Each pipeline gets the prompt twice: with
an encoder that fails and quotes the prompt, and as it is. Errors go to the client, so they are not printed. The last line of the output is
`WORDS` and all words.
"""

import logging
import random
import string
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers

from diffusion_worker import withheld
from support.families.images import masked_prompts, stable_diffusion, worded_images
from support.families.images.qwen import FAMILIES as QWEN
from support.families.rig.family import Family, build_seeded
from support.families.rig.family_rig import Asked, FamilyRig
from support.families.rig.tables import Request, asking, more
from support.families.rig.texts import letters, tiny_mt5, tiny_umt5

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
SEED = 11
# A request for a small image, whose prompt is replaced.
ASKED = asking(32, prompt="a red fox")
# A request with few tokens, since the tiny Lumina 2 has positions for no more.
SHORT = more(ASKED, max_sequence_length=16)
# Language models whose hidden states are the prompt's embeddings.
CAUSAL = [
    ("gemma", transformers.GemmaModel, transformers.GemmaConfig),
    ("gemma2", transformers.Gemma2Model, transformers.Gemma2Config),
    ("glm", transformers.GlmModel, partial(transformers.GlmConfig, pad_token_id=0)),
    ("llama", transformers.LlamaModel, transformers.LlamaConfig),
    ("mistral", transformers.MistralModel, transformers.MistralConfig),
    ("qwen3", transformers.Qwen3Model, transformers.Qwen3Config),
    ("smollm3", transformers.SmolLM3Model, partial(transformers.SmolLM3Config, pad_token_id=0)),
]
# The name of an encoder, the component to break, and a family.
Case = tuple[str, str, Family]


def words(count: int) -> list[str]:
    """Return `count` words of eight random letters from a fixed seed. A log that contains one has leaked the prompt, since no source has
    them."""
    rng = random.Random(SEED)
    return ["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(count)]


def with_words(name: str, make: Callable[[], Any], encoder: Callable[[], Any], request: Request = ASKED) -> Case:
    """Return a case: a pipeline of a family that otherwise takes embeddings, with a text encoder of its kind and a tokenizer of letters."""

    def build() -> Any:
        pipeline, tokenizer = make(), letters()
        tokenizer.model_max_length, tokenizer.padding_side = 64, "right"
        pipeline.register_modules(text_encoder=encoder(), tokenizer=tokenizer)
        return pipeline

    return name, "text_encoder", Family(name, name, build_seeded(build), request, output_type="pt")


def cases() -> list[Case]:
    stable = partial(stable_diffusion.pipeline, "StableDiffusionPipeline")
    lumina2 = partial(masked_prompts.lumina2, "Lumina2Pipeline")
    clip = transformers.CLIPTextConfig(**SIZES, max_position_embeddings=64, eos_token_id=1)
    worded = {family.name: family for family in worded_images.FAMILIES + QWEN}
    return [
        with_words("clip", stable, partial(transformers.CLIPTextModel, clip)),
        ("t5", "text_encoder_2", worded["FluxPipeline (words)"]),
        with_words("umt5", partial(masked_prompts.auraflow, "AuraFlowPipeline"), partial(tiny_umt5, 32)),
        with_words("mt5", partial(masked_prompts.auraflow, "AuraFlowPipeline"), partial(tiny_mt5, 32)),
        *(with_words(name, lumina2, partial(make, config(**GROUPED)), SHORT) for name, make, config in CAUSAL),
        ("qwen2_5_vl", "text_encoder", worded["QwenImagePipeline (words)"]),
        ("omnigen", "transformer", worded["OmniGenPipeline"]),
    ]


def served(rig: FamilyRig, prompt: str) -> bool:
    """Return whether a request was served."""
    results, errors = rig.outcome(Asked(steps=2, changes={"prompt": prompt}))
    return bool(results) and not errors


def breaks(prompt: str) -> Callable[..., Any]:
    """Return a forward method that warns and fails with the words of a prompt."""

    def broken(*_: Any, **__: Any) -> Any:
        warnings.warn(f"about to fail at {prompt}", stacklevel=1)
        raise ValueError(f"cannot encode {prompt}")

    return broken


def run(name: str, component: str, family: Family, prompt: str) -> bool:
    """Send the prompt with a broken encoder and with a working one, print both results, and return whether only the second succeeded."""
    withheld.withhold(False)
    rig = FamilyRig(family)
    withheld.withhold()
    # The broken encoder comes first, since an encoded prompt is cached.
    encoder = rig.pipeline.components[component]
    encoder.forward = breaks(prompt)
    first = served(rig, prompt)
    del encoder.forward
    second = served(rig, prompt)
    for each in (first, second):
        print("served" if each else "failed", name, flush=True)
    return second and not first


def main() -> int:
    """Encode 300 random words with the text encoders that the arguments name, and print the words at the end for the search of the logs.
    Return the exit code, 1 if any case went wrong."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    withheld.install()
    prompt = " ".join(words(300))
    right = [run(*case, prompt) for case in cases() if case[0] in sys.argv[1:]]
    print("WORDS", prompt)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
