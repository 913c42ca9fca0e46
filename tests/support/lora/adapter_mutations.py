# SPDX-License-Identifier: Apache-2.0
"""Wrong adapter files, made from good ones by seeds: one thing is wrong with each, and it says with which tensor.

Files are put together by hand here, so that a header can say what no library would write.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Entry = dict[str, Any]
ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1}
NO_NUMBERS = {"F32": (0x7FC00000, 0x7F800000, 0xFF800000), "F16": (0x7E00, 0x7C00), "BF16": (0x7FC0, 0x7F80)}


@dataclass
class RawFile:
    """A safetensors file in its parts; entries may be anything, and there may be two of a name."""

    entries: list[tuple[str, Any]]
    data: bytearray
    metadata: Any = None
    # What peft has beside it; None for a single file.
    config: bytes | None = None
    length_off_by: int = 0
    tail: bytes = b""

    @classmethod
    def parse(cls, content: bytes, config: bytes | None = None) -> "RawFile":
        """Take a good file apart."""
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        metadata = header.pop("__metadata__", None)
        return cls(list(header.items()), bytearray(content[end:]), metadata, config)

    def content(self) -> bytes:
        """The file's bytes."""
        parts = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.entries]
        if self.metadata is not None:
            parts.insert(0, f'"__metadata__": {json.dumps(self.metadata)}')
        header = ("{" + ", ".join(parts) + "}").encode()
        length = (len(header) + self.length_off_by) % (1 << 64)
        return length.to_bytes(8, "little") + header + bytes(self.data) + self.tail

    def entry(self, index: int) -> Entry:
        """The entry of a tensor; others keep theirs."""
        name, entry = self.entries[index]
        self.entries[index] = (name, {key: list(value) if isinstance(value, list) else value for key, value in entry.items()})
        return self.entries[index][1]

    def set_tensor(self, index: int, dtype: str, shape: list[int], data: bytes) -> None:
        """Another tensor in the place of one; the ranges after it move."""
        begin, end = self.entries[index][1]["data_offsets"]
        moved = len(data) - (end - begin)
        for other in range(len(self.entries)):
            offsets = self.entry(other)["data_offsets"]
            if offsets[0] >= end and other != index:
                offsets[:] = [offset + moved for offset in offsets]
        self.entry(index).update(dtype=dtype, shape=shape, data_offsets=[begin, begin + len(data)])
        self.data[begin:end] = data


@dataclass
class Mutation:
    """A file, what was done to it, and names of which a refusal has to tell one; none where the whole file is wrong."""

    kind: str
    file: RawFile
    content: bytes
    names: set[str] = field(default_factory=set)
    may_be_good: bool = False


Change = Callable[[random.Random, RawFile], set[str]]


def mutation(rng: random.Random, good: RawFile, other: RawFile) -> Mutation:
    """One wrong file out of a good one; `other` is a good one for another model."""
    kind = rng.choice(sorted(KINDS) + sorted(CONTENT_KINDS) + ["another model"] + (["config"] * 3 if good.config else []))
    file = RawFile([(name, dict(entry)) for name, entry in good.entries], bytearray(good.data), good.metadata, good.config)
    if kind == "another model":
        return Mutation(kind, other, other.content())
    if kind == "config":
        assert file.config is not None
        file.config = _config(rng, file.config)
        return Mutation(kind, file, file.content(), may_be_good=True)
    if kind in CONTENT_KINDS:
        return Mutation(kind, file, CONTENT_KINDS[kind](rng, file.content()), may_be_good=kind in MAYBE_GOOD)
    names = KINDS[kind](rng, file)
    return Mutation(kind, file, file.content(), names, may_be_good=kind in MAYBE_GOOD)


def _any(rng: random.Random, file: RawFile, *, factors: bool = True) -> int:
    """The index of some tensor; of a factor with at least two dimensions."""
    fits = [index for index, (_, entry) in enumerate(file.entries) if not factors or len(entry["shape"]) >= 2]
    return rng.choice(fits)


# --- one tensor -----------------------------------------------------------------------------------------------------------


def _not_finite(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file, factors=False)
    name, entry = file.entries[index]
    begin, end = entry["data_offsets"]
    item = ITEM_BYTES[entry["dtype"]]
    at = begin + item * rng.randrange((end - begin) // item)
    file.data[at : at + item] = rng.choice(NO_NUMBERS[entry["dtype"]]).to_bytes(item, "little")
    return {name}


def _reshape(rng: random.Random, file: RawFile) -> set[str]:
    """The same bytes in another shape."""
    index = _any(rng, file)
    entry = file.entry(index)
    rows, columns = entry["shape"][0], int(np.prod(entry["shape"][1:]))
    entry["shape"] = rng.choice([[columns * rows], [rows * columns, 1], [1, rows * columns], [1, rows, columns], [columns, rows, 1, 1, 1]])
    return {file.entries[index][0]}


def _other_width(rng: random.Random, file: RawFile) -> set[str]:
    """As many rows, of another length."""
    index = _any(rng, file)
    name, entry = file.entries[index]
    shape = [*entry["shape"]]
    axis = 0 if _is_b(name) else 1
    shape[axis] += rng.choice([1, 5, shape[axis]])
    return _replaced(rng, file, index, shape)


def _other_dtype(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file)
    name, entry = file.entries[index]
    dtype = rng.choice(["I32", "BOOL", "U8", "F8_E4M3", "I64", "F33", 7, None, ["F32"]])
    shape = entry["shape"]
    if isinstance(dtype, str) and dtype in ITEM_BYTES:
        file.set_tensor(index, dtype, shape, bytes(int(np.prod(shape)) * ITEM_BYTES[dtype]))
    else:
        file.entry(index)["dtype"] = dtype
    return {name}


def _huge_rank(rng: random.Random, file: RawFile) -> set[str]:
    """A rank that is there, or one that is only claimed."""
    index = next(index for index, (name, _) in enumerate(file.entries) if _is_a(name))
    name, entry = file.entries[index]
    if rng.random() < 0.5:
        file.entry(index)["shape"] = [rng.choice([10**6, 10**12, 10**18, 2**63, 2**64]), *entry["shape"][1:]]
        return {name}
    partner = next(other for other, (found, _) in enumerate(file.entries) if _is_b(found) and _module(found) == _module(name))
    rank = rng.choice([129, 500])
    b_shape = [*file.entries[partner][1]["shape"]]
    b_shape[1] = rank
    _replaced(rng, file, index, [rank, *entry["shape"][1:]])
    _replaced(rng, file, partner, b_shape)
    return {name, file.entries[partner][0]}


def _zero_rank(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file)
    name, entry = file.entries[index]
    shape = [*entry["shape"]]
    shape[rng.randrange(len(shape))] = 0
    file.set_tensor(index, entry["dtype"], shape, b"")
    return {name}


def _half(rng: random.Random, file: RawFile) -> set[str]:
    """One factor of a module is missing."""
    index = _any(rng, file)
    name, entry = file.entries[index]
    file.set_tensor(index, entry["dtype"], entry["shape"], b"")
    del file.entries[index]
    return {name}


def _renamed(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file)
    name, entry = file.entries[index]
    letter = rng.randrange(1, len(name))
    new = rng.choice(
        ["../../etc/passwd", "/etc/shadow", "C:\\x\\y", "a\x00b", "x\x1b[2J", "", ".", "weight", "x" * 9999, "\u202eevil", "__proto__",
         name[:letter] + "z" + name[letter + 1 :], name.upper(), name + ".x", "transformer." + name, name.replace(".", "..", 1)]
    )  # fmt: skip
    file.entries[index] = (new, entry)
    return {name, new, ascii(new)[1:161]}


def _twice(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file, factors=False)
    name, entry = file.entries[index]
    file.entries.insert(rng.randrange(len(file.entries)), (name, entry))
    return {name}


def _stranger(rng: random.Random, file: RawFile) -> set[str]:
    end = len(file.data)
    name = rng.choice(["stranger", "transformer.x.weight", "lora_unet_x.dora_scale", "y.lokr_w1", "z.diff_b", "q.alpha", "text_model.bias"])
    file.entries.append((name, {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}))
    file.data += bytes(8)
    return {name}


def _block_number(rng: random.Random, file: RawFile) -> set[str]:
    index = rng.choice([index for index, (name, _) in enumerate(file.entries) if "_0_" in name or ".0." in name])
    name, entry = file.entries[index]
    new = name.replace("_0_", f"_{10 ** rng.choice([3, 6, 12, 30])}_").replace(".0.", f".{10 ** rng.choice([3, 6, 12, 30])}.")
    file.entries[index] = (new, entry)
    return {name, new}


# --- the header -----------------------------------------------------------------------------------------------------------


def _offsets(rng: random.Random, file: RawFile) -> set[str]:
    """Ranges that overlap, lie, or leave holes: either of two neighbours may be told."""
    index = _any(rng, file, factors=False)
    begin, end = file.entries[index][1]["data_offsets"]
    size, all_bytes = end - begin, len(file.data)
    wrong: list[Any] = [[begin + 4, end + 4], [end, begin], [-8, end], [begin, end + 4], [2**63, 2**63 + size], [begin, end - 1]]
    wrong += [[all_bytes, all_bytes + size], [begin], None, "0", [begin, end, end], [begin, 1e300]]
    wrong += [[0, size]] if begin else [[4, 4 + size]]
    file.entry(index)["data_offsets"] = rng.choice(wrong)
    return {name for name, _ in file.entries}


def _entry_garbage(rng: random.Random, file: RawFile) -> set[str]:
    index = _any(rng, file, factors=False)
    name, entry = file.entries[index]
    shapes: list[Any] = ["2", [2.5], [True], [[1]], [1] * 99]
    wrong: list[Any] = [None, [], 3, "F32", {}, {"dtype": "F32"}, entry | {"extra": 1}, entry | {"dtype": {}}]
    file.entries[index] = (name, rng.choice(wrong + [entry | {"shape": shape} for shape in shapes]))
    return {name}


def _length(rng: random.Random, file: RawFile) -> set[str]:
    file.length_off_by = rng.choice([1, -1, 8, -9, 1000, -1000, 1 << 20, 1 << 40, (1 << 63)])
    return set()


def _metadata(rng: random.Random, file: RawFile) -> set[str]:
    """Good metadata of no meaning, settings and recipes that are none, and no table of strings at all."""
    garbage = rng.choice(["", "{", "[]", "3", "null", "[" * 5000,
                          '{"steps": -1}', '{"transformer.r": "x"}', '{"transformer.lora_alpha": 1e999}',
                          '{"transformer.use_dora": true}', '{"unet.r": 99}', '{"sigmas": [0, 0]}', '{"shift": NaN}'])  # fmt: skip
    file.metadata = rng.choice(
        [3, [], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"lora_adapter_metadata": garbage}, {"diffusion_recipe": garbage},
         {"ss_base_model_version": "\x00\x1b" * 99}, {"format": "pt", "x": "y" * 99999}]
    )  # fmt: skip
    return set()


def _replaced(rng: random.Random, file: RawFile, index: int, shape: list[int]) -> set[str]:
    """Random values of another shape, in the dtype that it has."""
    name, entry = file.entries[index]
    count = int(np.prod(shape))
    values = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(count).astype(np.float32)
    data = values.tobytes() if entry["dtype"] == "F32" else values.astype(np.float16).tobytes()
    file.set_tensor(index, "F32" if entry["dtype"] == "F32" else "F16", shape, data)
    return {name}


def _module(name: str) -> str:
    return min((name.split(end)[0] for end in (".lora_", ".lora.", "_lora.")), key=len)


def _is_a(name: str) -> bool:
    return "lora_A" in name or "down" in name.rpartition("lora")[2]


def _is_b(name: str) -> bool:
    return "lora_B" in name or "up" in name.rpartition("lora")[2]


# --- the bytes ------------------------------------------------------------------------------------------------------------


def _truncated(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def _flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flipped_header(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.choice([1, 1, 2, 4])):
        changed[rng.randrange(end)] = rng.randrange(256)
    return bytes(changed)


def _longer(rng: random.Random, content: bytes) -> bytes:
    return content + rng.randbytes(rng.choice([1, 8, 4096]))


def _no_adapter(rng: random.Random, content: bytes) -> bytes:
    beginning = rng.choice(
        [b"", b"PK\x03\x04", b"\x80\x04\x95", b"<html>", b"version https://git-lfs", b"\x89PNG", b"{}", bytes(8), b"\xff" * 8]
    )
    return beginning + rng.randbytes(rng.choice([0, 10, 5000]))


def _bomb(rng: random.Random, content: bytes) -> bytes:
    """JSON that is deep, long, or of one enormous number."""
    header = rng.choice(
        [b'{"a":' * 20000, b"[" * 100000, b'{"a":' + b"9" * 100000 + b"}", b'{"' + b"a" * 1000000 + b'": 1}',
         b"{" + b",".join(b'"%d":{}' % number for number in range(30000)) + b"}"]
    )  # fmt: skip
    return len(header).to_bytes(8, "little") + header


def _config(rng: random.Random, config: bytes) -> bytes:
    """Another value in a field, or no configuration at all."""
    if rng.random() < 0.2:
        return rng.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 99999, b'{"peft_type": "LORA"}', config[: len(config) // 2]])
    document = json.loads(config)
    name = rng.choice([*document, "use_dora", "bias", "alpha_pattern", "rank_pattern", "target_modules", "lora_alpha", "r", "peft_type"])
    document[name] = rng.choice(
        [None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "x", "(a+)+$", "(((", [], {}, ["to_q"], {"to_q": 3}, {"(x": 1},
         {"to_q": "3"},
         {"(.*)*": 2}, {"a{1,99999}": 1}, [[]], {"r": {}}]
    )  # fmt: skip
    return json.dumps(document).encode()


KINDS: dict[str, Change] = {
    "not finite": _not_finite, "other shape": _reshape, "other width": _other_width, "other dtype": _other_dtype, "huge rank": _huge_rank,
    "zero rank": _zero_rank, "half a module": _half, "renamed": _renamed, "name twice": _twice, "stranger": _stranger,
    "block number": _block_number, "offsets": _offsets, "entry": _entry_garbage, "header length": _length, "metadata": _metadata,
}  # fmt: skip
CONTENT_KINDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": _truncated, "bits": _flipped, "header bytes": _flipped_header, "longer": _longer, "no adapter": _no_adapter, "bomb": _bomb,
}  # fmt: skip
# What is changed there may not matter: such a file has to be as good as it was before.
MAYBE_GOOD = {"bits", "header bytes", "metadata", "other shape"}
