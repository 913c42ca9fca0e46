# SPDX-License-Identifier: Apache-2.0
"""The search for an adapter's files: its weights, and its peft configuration if it has one. Without torch."""

import re
from pathlib import Path
from typing import NamedTuple

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.regular_file import names_in

CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
WEIGHTS = ".safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
NAME_CHARACTER = r"[A-Za-z0-9_.:-]"
PLAIN_NAME = re.compile(f"{NAME_CHARACTER}+")


class Located(NamedTuple):
    """Paths where an adapter's weights and its peft configuration are read.

    In a folder in peft's layout both are set, even if one file is missing there. Elsewhere `config` is None if there is no such file.
    """

    weights: Path
    config: Path | None


def locate(path: Path, label: str, *, root: Path | None = None) -> Located:
    """Find the files of an adapter: those in the folder `path`, or the file `path` itself, whatever its name.

    A folder has peft's layout, diffusers' layout, or a single .safetensors file; the first of these counts.

    Raises:
        RequestError: InvalidAdapter for another folder or a path that cannot be read. UnsupportedFormat for a folder of pickles only.
    """
    names = names_in(path, label, root=root)
    if names is None:
        beside = (names_in(path.parent, label, root=root) or []) if path.name == PEFT_WEIGHTS else []
        return Located(path, path.with_name(CONFIG_FILE) if CONFIG_FILE in beside else None)
    if CONFIG_FILE in names or PEFT_WEIGHTS in names:
        return Located(path / PEFT_WEIGHTS, path / CONFIG_FILE)
    if DIFFUSERS_WEIGHTS in names:
        return Located(path / DIFFUSERS_WEIGHTS, None)
    files = [name for name in names if name.endswith(WEIGHTS)]
    if len(files) == 1:
        return Located(path / files[0], None)
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles and not files:
        message = f"{label}: expected a .safetensors file, found {shown(pickles[0])}; pickle can run code and is never read"
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, message)
    found = f"{len(files)} .safetensors files" if files else "none of these"
    expected = f"a folder with {CONFIG_FILE} and {PEFT_WEIGHTS}, with {DIFFUSERS_WEIGHTS}, or with just one .safetensors file"
    raise RequestError(ErrorCode.INVALID_ADAPTER, f"{label}: expected {expected}, found {found}")


def shown(name: str) -> str:
    """Return a name from a file for a message: a plain name as it is, any other shortened to 160 characters, escaped and quoted."""
    return name if len(name) <= 160 and PLAIN_NAME.fullmatch(name) else ascii(name[:160])
