# SPDX-License-Identifier: Apache-2.0
"""Model folders of real sizes without weights: from committed configurations, with tokenizers of letters made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import tokenizers
import transformers

CONFIGS = Path(__file__).with_name("configs")
MODEL_NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def description(name: str, *, tiny: bool) -> dict[str, Any]:
    """Read the committed description of a model: its pipeline, its parts and the size of an image; `tiny` makes the parts very small."""
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    small = found.pop("tiny")
    if tiny:
        for part, changes in small["parts"].items():
            found["parts"][part][2] |= changes
        found["size"] = small["size"]
    return found


def write_model(name: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Write a model folder without weights, which `--load-format dummy` loads, and return the model's description."""
    described = description(name, tiny=tiny)
    index: dict[str, Any] = {"_class_name": described["pipeline"], "_diffusers_version": diffusers.__version__}
    index |= {part: [None, None] for part in described["absent"]}
    for part, (library, kind, config) in described["parts"].items():
        index[part] = [library, kind]
        (folder / part).mkdir(parents=True)
        named = {"_class_name": kind} if library == "diffusers" else {}
        (folder / part / "config.json").write_text(json.dumps(named | config))
    for part, length in described["tokenizers"].items():
        index[part] = ["transformers", "PreTrainedTokenizerFast"]
        _letters(length).save_pretrained(str(folder / part))
    kind, config = described["scheduler"]
    index["scheduler"] = ["diffusers", kind]
    getattr(diffusers, kind)(**config).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index))
    return described


def _letters(length: int) -> Any:
    """Make a tokenizer with a token for each printable ASCII character and one for all others; at most `length` tokens."""
    characters = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({text: n for n, text in enumerate(characters)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    words = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **words)
