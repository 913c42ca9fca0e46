# SPDX-License-Identifier: Apache-2.0
"""An adapter's weights file in memory: found, read once, and its digest, tensors and values checked.

The digest is of exactly the bytes that the tensors lie in. A file in place may change at any time, so nothing is read twice.
"""

import hashlib
import itertools
import operator
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import (
    ITEM_BYTES,
    PICKLE_SUFFIXES,
    AdapterHeader,
    TensorEntry,
    open_file,
    parse_header,
    read_beginning,
    shown,
)
from diffusion_worker.lora.peft_settings import CONFIG_FILE

PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
FACTOR_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Some trainers write alpha as a whole number.
ALPHA_DTYPES = FACTOR_DTYPES | {"I64": torch.int64, "I32": torch.int32}
CHUNK_BYTES = 1 << 20


class AdapterFile(NamedTuple):
    """The bytes of a file, all of them read; the tensors are views of one buffer, of which hashing may still go on."""

    header: AdapterHeader
    hashed: Future[str]
    tensors: dict[str, torch.Tensor]

    @property
    def digest(self) -> str:
        """sha256 of all bytes; waits for it."""
        return self.hashed.result()


class Located(NamedTuple):
    """Where an adapter's weights are, and its peft configuration, where it has one."""

    weights: Path
    config: Path | None


def locate(path: Path, label: str) -> Located:
    """The files of an adapter's folder or file.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for a folder of pickles.
    """
    if not path.is_dir():
        config = path.with_name(CONFIG_FILE)
        return Located(path, config if path.name == PEFT_WEIGHTS and config.is_file() else None)
    if (path / CONFIG_FILE).exists() or (path / PEFT_WEIGHTS).exists():
        return Located(path / PEFT_WEIGHTS, path / CONFIG_FILE)
    if (path / DIFFUSERS_WEIGHTS).exists():
        return Located(path / DIFFUSERS_WEIGHTS, None)
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".safetensors")
    if len(files) == 1:
        return Located(path / files[0], None)
    pickles = sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLE_SUFFIXES)
    if pickles and not files:
        message = f"{label}: expected a .safetensors file, found {shown(pickles[0])}; pickle can run code and is never read"
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, message)
    found = f"{len(files)} .safetensors files" if files else "none of these"
    raise _invalid(f"{label}: expected {CONFIG_FILE} with {PEFT_WEIGHTS}, {DIFFUSERS_WEIGHTS} or one .safetensors file, found {found}")


def read_file(path: Path, label: str) -> AdapterFile:
    """Read a weights file and check all of its values.

    Raises:
        RequestError: InvalidAdapter with the first tensor that is wrong; UnsupportedFormat for a pickle.
    """
    label = f"{label}: {path.name}"
    descriptor = open_file(path, label)
    digest = hashlib.sha256()
    # Beside all that is done with the tensors: it takes as long, and lets other threads run meanwhile.
    hashing = ThreadPoolExecutor(max_workers=1)
    try:
        beginning, size = read_beginning(descriptor, label)
        header = parse_header(beginning, size, label=label)
        _check_dtypes(header, label)
        hashing.submit(digest.update, beginning)
        buffer = _read_rest(descriptor, size - len(beginning), lambda chunk: hashing.submit(digest.update, chunk), label)
        hashed = hashing.submit(lambda: f"sha256:{digest.hexdigest()}")
    finally:
        os.close(descriptor)
        hashing.shutdown(wait=False)
    views = {dtype: _numbers(buffer, dtype) for dtype in {entry.dtype for entry in header.tensors.values()}}
    tensors = {name: _view(buffer, views[entry.dtype], entry) for name, entry in header.tensors.items()}
    _check_finite(header, tensors, buffer, label)
    tensors = {name: _at_most_single(name, tensor, label) for name, tensor in tensors.items()}
    return AdapterFile(header, hashed, tensors)


def _read_rest(descriptor: int, size: int, hash_chunk: Callable[[memoryview], object], label: str) -> torch.Tensor:
    """The rest of an open file; each chunk is given away to be hashed when it is there."""
    buffer = torch.empty(size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    at = 0
    while at < size:
        count = os.readv(descriptor, [view[at : at + CHUNK_BYTES]])
        if not count:
            raise _invalid(f"{label}: the file became shorter while it was read: {at} of {size} bytes")
        hash_chunk(view[at : at + count])
        at += count
    if os.read(descriptor, 1):
        raise _invalid(f"{label}: the file became longer while it was read")
    return buffer


def _check_dtypes(header: AdapterHeader, label: str) -> None:
    for name, entry in header.tensors.items():
        allowed = ALPHA_DTYPES if name.endswith(".alpha") else FACTOR_DTYPES
        if entry.dtype not in allowed:
            raise _invalid(f"{label}: {name}: expected {', '.join(FACTOR_DTYPES)}, found {entry.dtype}")


def _numbers(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """All bytes looked at as numbers of a dtype, but for what is left over."""
    kind = ALPHA_DTYPES[dtype]
    return buffer[: len(buffer) - len(buffer) % kind.itemsize].view(kind)


def _view(buffer: torch.Tensor, numbers: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    item = numbers.dtype.itemsize
    if entry.begin % item:  # only aligned bytes can be looked at as numbers
        return buffer[entry.begin : entry.end].clone().view(numbers.dtype).view(entry.shape)
    shape = entry.shape
    if len(shape) != 2:
        return numbers[entry.begin // item : entry.end // item].view(shape)
    # Nearly all of them, some hundred: one call of torch each.
    return numbers.as_strided(shape, (shape[1], 1), entry.begin // item)


def _check_finite(header: AdapterHeader, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, label: str) -> None:
    """Runs of one dtype, which are one pass over memory; then tensor by tensor to name the first that is wrong."""
    in_order = sorted(header.tensors.values(), key=operator.attrgetter("begin"))
    groups = [(dtype, list(group)) for dtype, group in itertools.groupby(in_order, key=operator.attrgetter("dtype"))]
    runs = [(dtype, group[0].begin, group[-1].end) for dtype, group in groups]
    aligned = all(begin % ITEM_BYTES[dtype] == 0 for dtype, begin, _ in runs)
    if aligned and all(_is_finite(buffer[begin:end].view(ALPHA_DTYPES[dtype])) for dtype, begin, end in runs):
        return
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise _invalid(f"{label}: {name} has values that are not finite")


def _at_most_single(name: str, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """No layer computes in double precision; what is too large without it is infinite."""
    if tensor.dtype is not torch.float64:
        return tensor
    tensor = tensor.float()
    if not _is_finite(tensor):
        raise _invalid(f"{label}: {name} has values that are not finite in F32")
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is infinite or no number; the extremes tell, since no number is both of them."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
