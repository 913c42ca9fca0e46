# SPDX-License-Identifier: Apache-2.0
"""Faulty adapter files, made from good ones by seeds: each has one fault, and names the tensors concerned.

Real: the good files, in float32, that `make_file` wrote. Files are assembled byte by byte here, so that a header can contain what no
library would write.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Entry = dict[str, Any]
ITEM_BYTES = {"I32": 4, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1}


@dataclass
class RawFile:
    """The parts of a safetensors file; entries may be anything, and a name may occur twice."""

    entries: list[tuple[str, Any]]
    data: bytearray
    metadata: Any = None
    # peft's configuration beside the file; None for a single file.
    config: bytes | None = None
    length_off_by: int = 0

    @classmethod
    def parse(cls, content: bytes, config: bytes | None = None) -> "RawFile":
        """Split a good file into its parts."""
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        metadata = header.pop("__metadata__", None)
        return cls(list(header.items()), bytearray(content[end:]), metadata, config)

    def content(self) -> bytes:
        """Return the file's bytes."""
        parts = [] if self.metadata is None else [f'"__metadata__": {json.dumps(self.metadata)}']
        parts += [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.entries]
        header = ("{" + ", ".join(parts) + "}").encode()
        length = (len(header) + self.length_off_by) % (1 << 64)
        return length.to_bytes(8, "little") + header + bytes(self.data)

    def set_tensor(self, entry: Entry, dtype: str, shape: list[int], data: bytes) -> None:
        """Replace a tensor's dtype, shape and bytes, and move the ranges of the tensors after it to fit."""
        begin, end = entry["data_offsets"]
        for _, other in self.entries:
            if other["data_offsets"][0] >= end and other is not entry:
                other["data_offsets"] = [offset + begin + len(data) - end for offset in other["data_offsets"]]
        entry.update(dtype=dtype, shape=shape, data_offsets=[begin, begin + len(data)])
        self.data[begin:end] = data


@dataclass
class Mutation:
    """A file with a fault, and the kind of the fault. With `may_be_good` the file may load all the same.

    A refusal must mention one of `names`, its module or its target. They are empty where the fault is in no single tensor.
    """

    kind: str
    file: RawFile
    content: bytes
    names: set[str] = field(default_factory=set)
    may_be_good: bool = False


def mutation(rng: random.Random, good: RawFile, other: RawFile) -> Mutation:
    """Make a faulty file from a good one by a random kind of fault; the good one stays. `other` is a good file for another model."""
    kind = rng.choice(sorted(KINDS - {"config"}) + (["config"] * 3 if good.config else []))
    mutator = Mutator(rng, RawFile.parse(good.content(), good.config), other)
    getattr(mutator, kind)()
    file = mutator.file
    content = file.content() if mutator.content is None else mutator.content
    return Mutation(kind, file, content, mutator.names, may_be_good=kind in MAYBE_GOOD)


class Mutator:
    """Kinds of faults, a public method each: it changes `file`, or sets `content` instead. A refusal may mention any of `names`."""

    def __init__(self, rng: random.Random, file: RawFile, other: RawFile) -> None:
        self.rng, self.file, self.other = rng, file, other
        self.names: set[str] = set()
        self.content: bytes | None = None

    def not_finite(self) -> None:
        _, entry = self._tensor(dimensions=0)
        begin, end = entry["data_offsets"]
        at = begin + 4 * self.rng.randrange((end - begin) // 4)
        self.file.data[at : at + 4] = self.rng.choice((0x7FC00000, 0x7F800000, 0xFF800000)).to_bytes(4, "little")

    def other_shape(self) -> None:
        """Give a tensor another shape over the same bytes."""
        _, entry = self._tensor()
        rows, columns = entry["shape"][0], int(np.prod(entry["shape"][1:]))
        shapes = [[columns * rows], [rows * columns, 1], [1, rows * columns], [1, rows, columns], [columns, rows, 1, 1, 1]]
        entry["shape"] = self.rng.choice(shapes)

    def other_width(self) -> None:
        """Enlarge a factor along the axis that the model's layer fixes, which is B's outputs or A's inputs; the rank stays."""
        index, entry = self._tensor()
        shape = [*entry["shape"]]
        axis = 0 if _is(B, self.file.entries[index][0]) else 1
        shape[axis] += self.rng.choice([1, 5, shape[axis]])
        self._replace(entry, shape)

    def other_dtype(self) -> None:
        _, entry = self._tensor()
        dtype = self.rng.choice(["I32", "BOOL", "U8", "F8_E4M3", "I64", "F33", 7, None, ["F32"]])
        if isinstance(dtype, str) and dtype in ITEM_BYTES:
            self.file.set_tensor(entry, dtype, entry["shape"], bytes(int(np.prod(entry["shape"])) * ITEM_BYTES[dtype]))
        entry["dtype"] = dtype

    def zero_rank(self) -> None:
        _, entry = self._tensor()
        shape = [*entry["shape"]]
        shape[self.rng.randrange(len(shape))] = 0
        self.file.set_tensor(entry, entry["dtype"], shape, b"")

    def half_a_module(self) -> None:
        """Drop a factor of a module."""
        index, entry = self._tensor()
        self.file.set_tensor(entry, entry["dtype"], entry["shape"], b"")
        del self.file.entries[index]

    def renamed(self) -> None:
        index, entry = self._tensor()
        name = self.file.entries[index][0]
        letter = self.rng.randrange(1, len(name))
        new = self.rng.choice(
            ["../../etc/passwd", "/etc/shadow", "C:\\x\\y", "a\x00b", "x\x1b[2J", "", ".", "weight", "x" * 9999, "\u202eevil", "__proto__",
             name[:letter] + "z" + name[letter + 1 :], name.upper(), name + ".x", "transformer." + name, name.replace(".", "..", 1)]
        )  # fmt: skip
        self.file.entries[index] = (new, entry)
        self.names |= {new, ascii(new)[1:161]}

    def name_twice(self) -> None:
        index, _ = self._tensor(dimensions=0)
        self.file.entries.insert(self.rng.randrange(len(self.file.entries)), self.file.entries[index])

    def offsets(self) -> None:
        """Give a tensor a range that overlaps, is invalid, or leaves holes: a refusal may mention either of two neighbours."""
        _, entry = self._tensor(dimensions=0)
        begin, end = entry["data_offsets"]
        size, all_bytes = end - begin, len(self.file.data)
        entry["data_offsets"] = self.rng.choice(
            [[begin + 4, end + 4], [end, begin], [-8, end], [begin, end + 4], [2**63, 2**63 + size], [begin, end - 1],
             [all_bytes, all_bytes + size], [begin], None, "0", [begin, end, end], [begin, 1e300], [0, size] if begin else [4, 4 + size]]
        )  # fmt: skip
        self.names |= {name for name, _ in self.file.entries}

    def entry(self) -> None:
        index, entry = self._tensor(dimensions=0)
        wrong: list[Any] = [None, [], 3, "F32", {}, {"dtype": "F32"}, entry | {"extra": 1}, entry | {"dtype": {}}]
        wrong += [entry | {"shape": shape} for shape in ("2", [2.5], [True], [[1]], [1] * 99)]
        self.file.entries[index] = (self.file.entries[index][0], self.rng.choice(wrong))

    def _tensor(self, *, dimensions: int = 2) -> tuple[int, Entry]:
        """Choose a tensor of so many dimensions or more at random, and add its name to `names`; return its index and entry."""
        index = self.rng.choice([index for index, (_, entry) in enumerate(self.file.entries) if len(entry["shape"]) >= dimensions])
        name, entry = self.file.entries[index]
        self.names.add(name)
        return index, entry

    def _replace(self, entry: Entry, shape: list[int]) -> None:
        """Put random values of another shape in a tensor's place."""
        values = np.random.default_rng(self.rng.randrange(1 << 30)).standard_normal(int(np.prod(shape))).astype(np.float32)
        self.file.set_tensor(entry, "F32", shape, values.tobytes())

    def huge_rank(self) -> None:
        """Give a module a rank above the limit, or claim such a rank without its bytes."""
        name, entry = next((name, entry) for name, entry in self.file.entries if _is(A, name))
        self.names.add(name)
        if self.rng.random() < 0.5:
            entry["shape"] = [self.rng.choice([10**6, 10**12, 10**18, 2**63, 2**64]), *entry["shape"][1:]]
            return
        partner, other = next((found, other) for found, other in self.file.entries if _is(B, found) and _module(found) == _module(name))
        self.names.add(partner)
        rank = self.rng.choice([129, 500])
        self._replace(entry, [rank, *entry["shape"][1:]])
        self._replace(other, [other["shape"][0], rank, *other["shape"][2:]])

    def stranger(self) -> None:
        end = len(self.file.data)
        strangers = ["stranger", "transformer.x.weight", "lora_unet_x.dora_scale", "y.lokr_w1", "z.diff_b", "q.alpha", "text_model.bias"]
        self.names.add(name := self.rng.choice(strangers))
        self.file.entries.append((name, {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}))
        self.file.data += bytes(8)

    def block_number(self) -> None:
        index = self.rng.choice([index for index, (name, _) in enumerate(self.file.entries) if "_0_" in name or ".0." in name])
        name, entry = self.file.entries[index]
        new = name.replace("_0_", f"_{10 ** self.rng.choice([3, 6, 12, 30])}_").replace(".0.", f".{10 ** self.rng.choice([3, 6, 12, 30])}.")
        self.file.entries[index] = (new, entry)
        self.names |= {name, new}

    def header_length(self) -> None:
        self.file.length_off_by = self.rng.choice([1, -1, 8, -9, 1000, -1000, 1 << 20, 1 << 40, (1 << 63)])

    def metadata(self) -> None:
        """Replace the metadata: by unknown keys, by invalid settings and recipes, or by something that is not a table of strings."""
        garbage = self.rng.choice(
            ["", "{", "[]", "3", "null", "[" * 5000, '{"steps": -1}', '{"transformer.r": "x"}', '{"transformer.lora_alpha": 1e999}',
             '{"transformer.use_dora": true}', '{"unet.r": 99}', '{"sigmas": [0, 0]}', '{"shift": NaN}']
        )  # fmt: skip
        self.file.metadata = self.rng.choice(
            [3, [], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"lora_adapter_metadata": garbage}, {"diffusion_recipe": garbage},
             {"ss_base_model_version": "\x00\x1b" * 99}, {"format": "pt", "x": "y" * 99999}]
        )  # fmt: skip

    def truncated(self) -> None:
        content = self.file.content()
        self.content = content[: self.rng.randrange(len(content))]

    def longer(self) -> None:
        self.content = self.file.content() + self.rng.randbytes(self.rng.choice([1, 8, 4096]))

    def bits(self) -> None:
        changed = bytearray(self.file.content())
        for _ in range(self.rng.choice([1, 1, 2, 8, 64])):
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        self.content = bytes(changed)

    def header_bytes(self) -> None:
        changed = bytearray(self.file.content())
        end = 8 + int.from_bytes(changed[:8], "little")
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            changed[self.rng.randrange(end)] = self.rng.randrange(256)
        self.content = bytes(changed)

    def no_adapter(self) -> None:
        beginnings = (b"", b"PK\x03\x04", b"\x80\x04\x95", b"<html>", b"version https://git-lfs", b"\x89PNG", b"{}", bytes(8), b"\xff" * 8)
        self.content = self.rng.choice(beginnings) + self.rng.randbytes(self.rng.choice([0, 10, 5000]))

    def bomb(self) -> None:
        """Replace the file by a header that costs time or memory to parse.

        It is nested 20,000 deep or more, or has 30,000 entries, a very long number or a very long name.
        """
        header = self.rng.choice(
            [b'{"a":' * 20000, b"[" * 100000, b'{"a":' + b"9" * 100000 + b"}", b'{"' + b"a" * 1000000 + b'": 1}',
             b"{" + b",".join(b'"%d":{}' % number for number in range(30000)) + b"}"]
        )  # fmt: skip
        self.content = len(header).to_bytes(8, "little") + header

    def another_model(self) -> None:
        self.file = self.other

    def config(self) -> None:
        """Change a field of the configuration, or replace the configuration by bytes that are none or lack most fields."""
        config = self.file.config or b"{}"
        if self.rng.random() < 0.2:
            broken = (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 99999, b'{"peft_type": "LORA"}', config[: len(config) // 2])
            self.file.config = self.rng.choice(broken)
            return
        document = json.loads(config)
        others = ("use_dora", "bias", "alpha_pattern", "rank_pattern", "target_modules", "lora_alpha", "r", "peft_type")
        name = self.rng.choice([*document, *others])
        document[name] = self.rng.choice(
            [None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "x", "(a+)+$", "(((", [], {}, ["to_q"], {"to_q": 3}, {"(x": 1},
             {"to_q": "3"}, {"(.*)*": 2}, {"a{1,99999}": 1}, [[]], {"r": {}}]
        )  # fmt: skip
        self.file.config = json.dumps(document).encode()


KINDS = {name for name in vars(Mutator) if not name.startswith("_")}
# Mutations that may be harmless: a file that loads must be as good as before.
MAYBE_GOOD = {"bits", "config", "header_bytes", "metadata", "other_shape"}
# The names of the two factors: as peft has them, and the part of Kohya's that follows "lora".
A, B = ("lora_A", "down"), ("lora_B", "up")


def _module(name: str) -> str:
    return min((name.split(end)[0] for end in (".lora_", ".lora.", "_lora.")), key=len)


def _is(factor: tuple[str, str], name: str) -> bool:
    return factor[0] in name or factor[1] in name.rpartition("lora")[2]
