# SPDX-License-Identifier: Apache-2.0
"""Selection of a repository's or folder's files, and their local names. Pure."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from diffusion_worker.config import MODEL_INDEXES
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.located import CONFIG_FILE, PEFT_WEIGHTS, WEIGHTS
from diffusion_worker.sources.in_place import REFUSED_ENDINGS, refuse_endings

# The local name of an adapter's weights, independent of the source's name.
ADAPTER_WEIGHTS = PEFT_WEIGHTS
MODEL_ENDINGS = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".spm", ".vocab")
# Names of weights in another precision, which are fetched only if there are no plain ones.
VARIANT = re.compile(r"\.(fp16|bf16|fp8|non_ema|ema)[.-]")
NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
MAX_FILES = 4096
MAX_DEPTH = 8


def adapter_files(names: Sequence[str], label: str, *, patterns: Sequence[str] = ()) -> dict[str, str]:
    """Choose the files of an adapter's folder, its weights and its config if there is one, and return their names by local name.

    Only files at its top that match one of `patterns`, if there are any, count. The weights are `adapter_model.safetensors` or the only
    *.safetensors file.

    Raises:
        RequestError: UnsupportedFormat, only pickles or archives; InvalidAdapter, no weights, or several to choose from.
    """
    here = [name for name in names if "/" not in name and _matches(name, patterns)]
    weights = [name for name in here if name.endswith(WEIGHTS)]
    chosen = ADAPTER_WEIGHTS if ADAPTER_WEIGHTS in weights else weights[0] if len(weights) == 1 else None
    if not weights:
        refuse_endings(here, label)
        raise RequestError(ErrorCode.INVALID_ADAPTER, f"{label}: expected a *{WEIGHTS} file, found none")
    if chosen is None:
        raise RequestError(
            ErrorCode.INVALID_ADAPTER,
            f"{label}: expected one *{WEIGHTS} file, or the name of one, found {', '.join(sorted(weights)[:5])}",
        )
    return {ADAPTER_WEIGHTS: chosen} | ({CONFIG_FILE: CONFIG_FILE} if CONFIG_FILE in here else {})


def model_files(names: Sequence[str], label: str, *, patterns: Sequence[str] = ()) -> dict[str, str]:
    """Choose the files of a model's folder, and return their names by local name, which is the same.

    With `patterns` they are those that match one, else the usual ones of a diffusers folder; never hidden files, pickles or archives.

    Raises:
        RequestError: UnsupportedFormat, no index, no weights but pickles, or an unsafe name; TooLarge, too many files.
    """
    visible = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    allowed = [name for name in visible if not name.lower().endswith(REFUSED_ENDINGS)]
    chosen = [name for name in allowed if _matches(name, patterns)] if patterns else _usual(allowed)
    if not any(name in MODEL_INDEXES for name in chosen):
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a diffusers folder, found no {' or '.join(MODEL_INDEXES)} in it"
        )
    if not any(name.endswith(WEIGHTS) for name in chosen):
        refuse_endings(visible, label)
    if len(chosen) > MAX_FILES:
        raise RequestError(ErrorCode.TOO_LARGE, f"{label}: expected at most {MAX_FILES} files in the folder, found {len(chosen)}")
    for name in chosen:
        require_plain(name, label)
    return {name: name for name in chosen}


def single_adapter(name: str, label: str) -> None:
    """Raise RequestError (UnsupportedFormat) if a file's name does not end in .safetensors."""
    refuse_endings([name], label)
    if not name.endswith(WEIGHTS):
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a *{WEIGHTS} file, found {name!r}")


def require_plain(name: str, label: str) -> None:
    """Raise RequestError (UnsupportedFormat) for a name that is unsafe in a local folder: a source's names become paths there."""
    parts = name.split("/")
    if len(parts) > MAX_DEPTH or not all(NAME_PART.fullmatch(part) for part in parts):
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"{label}: expected a path of at most {MAX_DEPTH} plain names (letters, digits and ._+-), found {name[:200]!r}",
        )


def _usual(names: list[str]) -> list[str]:
    """Select a model's files by their endings, without single-file weights at the top, which diffusers' folders do not need.

    Weights in another precision (fp16 and the like) are selected only in folders that have no plain ones.
    """
    files = [name for name in names if name.endswith(MODEL_ENDINGS) and ("/" in name or not name.endswith(WEIGHTS))]
    plain = {PurePosixPath(name).parent for name in files if name.endswith(WEIGHTS) and not VARIANT.search(PurePosixPath(name).name)}
    return [name for name in files if PurePosixPath(name).parent not in plain or not VARIANT.search(PurePosixPath(name).name)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
