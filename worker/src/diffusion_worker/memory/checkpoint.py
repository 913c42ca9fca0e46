# SPDX-License-Identifier: Apache-2.0
"""The weights of one component: a safetensors file, or several with an index, checked against each other before anything is read."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.weight_files import StoredTensor, WeightFile

MOST_NAMES = 3

logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """The stored tensors of a component by name.

    `variant` is the part `fp16` of names like `model.fp16.safetensors`; None for plain names.
    """

    tensors: dict[str, StoredTensor]
    variant: str | None
    sharded: bool


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


def read_checkpoint(folder: Path, stem: str, *, index_first: bool) -> Checkpoint:
    """Read the headers of a component's weights: of the files in its folder that are named after `stem`.

    If both a single file and an index exist, `index_first` lets the index win. Without either, files of the folder's only variant
    are used.

    Raises:
        ConfigError: there are no weights, or only several variants, or they are not what their headers and their index say.
    """
    for variant in (None, *_only_variant(folder, stem)):
        single, index = _names(stem, variant)
        for name in (index, single) if index_first else (single, index):
            if (folder / name).exists():
                tensors = _read_sharded(folder / name) if name == index else WeightFile(folder / name).tensors
                return Checkpoint(tensors, variant, sharded=name == index)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    found = f"only {pickled[0]}, and pickled weights are never loaded" if pickled else "none there"
    raise ConfigError(f"{folder}: expected weights in {stem}.safetensors or in shards with an index, found {found}")


def stored_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files by name; of a name in several files, that of the last file by name.

    Files that cannot be read are logged and left out. The result may be empty.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= WeightFile(path).tensors
        except ConfigError as error:
            logger.warning("a file of weights is left out: %s", error)
    return tensors


def _names(stem: str, variant: str | None) -> tuple[str, str]:
    """Return the file names of unsharded weights and of a shard index. A variant goes before the last suffix of each."""
    if variant is None:
        return f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    return f"{stem}.{variant}.safetensors", f"{stem}.safetensors.index.{variant}.json"


def _only_variant(folder: Path, stem: str) -> list[str]:
    singles = {path.name.removeprefix(f"{stem}.").removesuffix(".safetensors") for path in folder.glob(f"{stem}.*.safetensors")}
    indices = {path.name.removeprefix(f"{stem}.safetensors.index.").removesuffix(".json") for path in folder.glob(f"{stem}.*.index.*.json")}
    # Shards of a variant match as well, as `fp16-00001-of-00002`. Such a name is no variant's.
    found = sorted(name for name in singles | indices if name.isalnum())
    if len(found) > 1 and not any((folder / name).exists() for name in _names(stem, None)):
        expected = f"{stem}.safetensors or files of a single variant (no option selects one)"
        raise ConfigError(f"{folder}: expected {expected}, found the variants {', '.join(found)}")
    return found[:1]


def _read_sharded(index: Path) -> dict[str, StoredTensor]:
    try:
        said = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{index}: cannot be read as an index of weights files: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(said.weight_map.values())):
        if Path(name).name != name:
            raise ConfigError(f"{index}: expected names of files in its own folder, found {name!r}")
        if not (index.parent / name).exists():
            missing = [tensor for tensor, file in said.weight_map.items() if file == name]
            raise ConfigError(f"{index}: the file {name} is missing, and with it {some_tensors(missing)}")
        file = WeightFile(index.parent / name)
        if twice := tensors.keys() & file.tensors.keys():
            other = tensors[min(twice)].file.path.name
            raise ConfigError(f"{index}: both {other} and {name} have {some_tensors(twice)}")
        tensors |= file.tensors
    _check_index(index, said, tensors)
    return tensors


def _check_index(index: Path, said: _Index, tensors: dict[str, StoredTensor]) -> None:
    if absent := said.weight_map.keys() - tensors.keys():
        raise ConfigError(f"{index}: this index lists {some_tensors(absent)}, which none of its files has")
    if elsewhere := [name for name, file in said.weight_map.items() if tensors[name].file.path.name != file]:
        name = min(elsewhere)
        found, expected = tensors[name].file.path.name, said.weight_map[name]
        raise ConfigError(f"{index}: expected {some_tensors(elsewhere)} in {expected}, found {name} in {found}")
    if unnamed := tensors.keys() - said.weight_map.keys():
        raise ConfigError(f"{index}: does not list {some_tensors(unnamed)}, which its files hold")
    total = sum(stored.nbytes for stored in tensors.values())
    expected_total = (said.metadata or {}).get("total_size")
    if expected_total not in (None, total):
        # Tools that rename or convert tensors leave total_size as it was. All tensors were found, so a warning is enough.
        logger.warning("%s: total_size says %s bytes, and its files have %d; they are used", index, expected_total, total)


def some_tensors(names: Any) -> str:
    """Name tensors in a message: how many there are, and the first few of them."""
    listed = ", ".join(sorted(names)[:MOST_NAMES])
    return f"{len(names)} tensors ({listed}{', …' if len(names) > MOST_NAMES else ''})" if len(names) > 1 else f"tensor {listed}"
