# SPDX-License-Identifier: Apache-2.0
"""Wrong adapter files, made from good ones by seeds: one thing is wrong with each, and it says with which tensor.

Real: the good files, in float32, that `make_file` wrote. Files are put together by hand here, so that a header can say what no
library would write.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Entry = dict[str, Any]
ITEM_BYTES = {"I32": 4, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1}


@dataclass
class RawFile:
    """A safetensors file in its parts; entries may be anything, and there may be two of a name."""

    entries: list[tuple[str, Any]]
    data: bytearray
    metadata: Any = None
    # What peft has beside it; None for a single file.
    config: bytes | None = None
    length_off_by: int = 0

    @classmethod
    def parse(cls, content: bytes, config: bytes | None = None) -> "RawFile":
        """Take a good file apart."""
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        metadata = header.pop("__metadata__", None)
        return cls(list(header.items()), bytearray(content[end:]), metadata, config)

    def content(self) -> bytes:
        """The file's bytes."""
        parts = [] if self.metadata is None else [f'"__metadata__": {json.dumps(self.metadata)}']
        parts += [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.entries]
        header = ("{" + ", ".join(parts) + "}").encode()
        length = (len(header) + self.length_off_by) % (1 << 64)
        return length.to_bytes(8, "little") + header + bytes(self.data)

    def set_tensor(self, entry: Entry, dtype: str, shape: list[int], data: bytes) -> None:
        """Another tensor in the place of one; the ranges after it move."""
        begin, end = entry["data_offsets"]
        for _, other in self.entries:
            if other["data_offsets"][0] >= end and other is not entry:
                other["data_offsets"] = [offset + begin + len(data) - end for offset in other["data_offsets"]]
        entry.update(dtype=dtype, shape=shape, data_offsets=[begin, begin + len(data)])
        self.data[begin:end] = data


@dataclass
class Mutation:
    """A file, what was done to it, and names of which a refusal has to tell one; none where the whole file is wrong."""

    kind: str
    file: RawFile
    content: bytes
    names: set[str] = field(default_factory=set)
    may_be_good: bool = False


def mutation(rng: random.Random, good: RawFile, other: RawFile) -> Mutation:
    """One wrong file out of a good one; `other` is a good one for another model."""
    kind = rng.choice(sorted(KINDS) + sorted(CONTENT_KINDS) + ["another model"] + (["config"] * 3 if good.config else []))
    file = other if kind == "another model" else RawFile.parse(good.content(), good.config)
    if kind == "config" and file.config is not None:
        file.config = _config(rng, file.config)
    names = KINDS[kind](rng, file) if kind in KINDS else set()
    content = CONTENT_KINDS[kind](rng, file.content()) if kind in CONTENT_KINDS else file.content()
    return Mutation(kind, file, content, names, may_be_good=kind in MAYBE_GOOD)


Change = Callable[[random.Random, RawFile], set[str]]


def _one_tensor(change: Callable[[random.Random, RawFile, int, Entry], set[str] | None], *, dimensions: int = 2) -> Change:
    """A change of some tensor of so many dimensions or more; a refusal may tell its name, or one that the change returns."""

    def changed(rng: random.Random, file: RawFile) -> set[str]:
        index = rng.choice([index for index, (_, entry) in enumerate(file.entries) if len(entry["shape"]) >= dimensions])
        name, entry = file.entries[index]
        return {name} | (change(rng, file, index, entry) or set())

    return changed


# --- one tensor -----------------------------------------------------------------------------------------------------------


def _not_finite(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    begin, end = entry["data_offsets"]
    at = begin + 4 * rng.randrange((end - begin) // 4)
    file.data[at : at + 4] = rng.choice((0x7FC00000, 0x7F800000, 0xFF800000)).to_bytes(4, "little")


def _reshape(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    """The same bytes in another shape."""
    rows, columns = entry["shape"][0], int(np.prod(entry["shape"][1:]))
    entry["shape"] = rng.choice([[columns * rows], [rows * columns, 1], [1, rows * columns], [1, rows, columns], [columns, rows, 1, 1, 1]])


def _other_width(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    """As many rows, of another length."""
    shape = [*entry["shape"]]
    axis = 0 if _is(B, file.entries[index][0]) else 1
    shape[axis] += rng.choice([1, 5, shape[axis]])
    _replace(rng, file, entry, shape)


def _other_dtype(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    dtype = rng.choice(["I32", "BOOL", "U8", "F8_E4M3", "I64", "F33", 7, None, ["F32"]])
    if isinstance(dtype, str) and dtype in ITEM_BYTES:
        file.set_tensor(entry, dtype, entry["shape"], bytes(int(np.prod(entry["shape"])) * ITEM_BYTES[dtype]))
    entry["dtype"] = dtype


def _zero_rank(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    shape = [*entry["shape"]]
    shape[rng.randrange(len(shape))] = 0
    file.set_tensor(entry, entry["dtype"], shape, b"")


def _half(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    """One factor of a module is missing."""
    file.set_tensor(entry, entry["dtype"], entry["shape"], b"")
    del file.entries[index]


def _renamed(rng: random.Random, file: RawFile, index: int, entry: Entry) -> set[str]:
    name = file.entries[index][0]
    letter = rng.randrange(1, len(name))
    new = rng.choice(
        ["../../etc/passwd", "/etc/shadow", "C:\\x\\y", "a\x00b", "x\x1b[2J", "", ".", "weight", "x" * 9999, "\u202eevil", "__proto__",
         name[:letter] + "z" + name[letter + 1 :], name.upper(), name + ".x", "transformer." + name, name.replace(".", "..", 1)]
    )  # fmt: skip
    file.entries[index] = (new, entry)
    return {new, ascii(new)[1:161]}


def _twice(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    file.entries.insert(rng.randrange(len(file.entries)), file.entries[index])


def _offsets(rng: random.Random, file: RawFile, index: int, entry: Entry) -> set[str]:
    """Ranges that overlap, lie, or leave holes: a refusal may tell either of two neighbours."""
    begin, end = entry["data_offsets"]
    size, all_bytes = end - begin, len(file.data)
    entry["data_offsets"] = rng.choice(
        [[begin + 4, end + 4], [end, begin], [-8, end], [begin, end + 4], [2**63, 2**63 + size], [begin, end - 1],
         [all_bytes, all_bytes + size], [begin], None, "0", [begin, end, end], [begin, 1e300], [0, size] if begin else [4, 4 + size]]
    )  # fmt: skip
    return {name for name, _ in file.entries}


def _entry_garbage(rng: random.Random, file: RawFile, index: int, entry: Entry) -> None:
    wrong: list[Any] = [None, [], 3, "F32", {}, {"dtype": "F32"}, entry | {"extra": 1}, entry | {"dtype": {}}]
    wrong += [entry | {"shape": shape} for shape in ("2", [2.5], [True], [[1]], [1] * 99)]
    file.entries[index] = (file.entries[index][0], rng.choice(wrong))


# --- several tensors, or none ---------------------------------------------------------------------------------------------


def _huge_rank(rng: random.Random, file: RawFile) -> set[str]:
    """A rank that is there, or one that is only claimed."""
    name, entry = next((name, entry) for name, entry in file.entries if _is(A, name))
    if rng.random() < 0.5:
        entry["shape"] = [rng.choice([10**6, 10**12, 10**18, 2**63, 2**64]), *entry["shape"][1:]]
        return {name}
    partner, other = next((found, other) for found, other in file.entries if _is(B, found) and _module(found) == _module(name))
    rank = rng.choice([129, 500])
    _replace(rng, file, entry, [rank, *entry["shape"][1:]])
    _replace(rng, file, other, [other["shape"][0], rank, *other["shape"][2:]])
    return {name, partner}


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


def _length(rng: random.Random, file: RawFile) -> set[str]:
    file.length_off_by = rng.choice([1, -1, 8, -9, 1000, -1000, 1 << 20, 1 << 40, (1 << 63)])
    return set()


def _metadata(rng: random.Random, file: RawFile) -> set[str]:
    """Good metadata of no meaning, settings and recipes that are none, and no table of strings at all."""
    garbage = rng.choice(
        ["", "{", "[]", "3", "null", "[" * 5000, '{"steps": -1}', '{"transformer.r": "x"}', '{"transformer.lora_alpha": 1e999}',
         '{"transformer.use_dora": true}', '{"unet.r": 99}', '{"sigmas": [0, 0]}', '{"shift": NaN}']
    )  # fmt: skip
    file.metadata = rng.choice(
        [3, [], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"lora_adapter_metadata": garbage}, {"diffusion_recipe": garbage},
         {"ss_base_model_version": "\x00\x1b" * 99}, {"format": "pt", "x": "y" * 99999}]
    )  # fmt: skip
    return set()


def _replace(rng: random.Random, file: RawFile, entry: Entry, shape: list[int]) -> None:
    """Put random values of another shape in a tensor's place."""
    values = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(int(np.prod(shape))).astype(np.float32)
    file.set_tensor(entry, "F32", shape, values.tobytes())


def _module(name: str) -> str:
    return min((name.split(end)[0] for end in (".lora_", ".lora.", "_lora.")), key=len)


# The names of the two factors: as peft has them, and the part of Kohya's that follows "lora".
A, B = ("lora_A", "down"), ("lora_B", "up")


def _is(factor: tuple[str, str], name: str) -> bool:
    return factor[0] in name or factor[1] in name.rpartition("lora")[2]


# --- the bytes ------------------------------------------------------------------------------------------------------------


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
         {"to_q": "3"}, {"(.*)*": 2}, {"a{1,99999}": 1}, [[]], {"r": {}}]
    )  # fmt: skip
    return json.dumps(document).encode()


KINDS: dict[str, Change] = {
    "not finite": _one_tensor(_not_finite, dimensions=0), "other shape": _one_tensor(_reshape), "other width": _one_tensor(_other_width),
    "other dtype": _one_tensor(_other_dtype), "huge rank": _huge_rank, "zero rank": _one_tensor(_zero_rank),
    "half a module": _one_tensor(_half), "renamed": _one_tensor(_renamed), "name twice": _one_tensor(_twice, dimensions=0),
    "stranger": _stranger, "block number": _block_number, "offsets": _one_tensor(_offsets, dimensions=0),
    "entry": _one_tensor(_entry_garbage, dimensions=0), "header length": _length, "metadata": _metadata,
}  # fmt: skip
CONTENT_KINDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": lambda rng, content: content[: rng.randrange(len(content))],
    "longer": lambda rng, content: content + rng.randbytes(rng.choice([1, 8, 4096])),
    "bits": _flipped, "header bytes": _flipped_header, "no adapter": _no_adapter, "bomb": _bomb,
}  # fmt: skip
# What is changed there may not matter: such a file has to be as good as it was before.
MAYBE_GOOD = {"bits", "config", "header bytes", "metadata", "other shape"}
