# SPDX-License-Identifier: Apache-2.0
"""Hostile sources of adapters, drawn from a seed: bad addresses, bad servers, and files that are no adapters.

Each has the codes that may refuse it. An ordinary source, where `loads` is true, must be loaded. It may be loaded where `loads` is None.
"""

import gzip
import ipaddress
import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file, save

from support.sources.servers import Served, SourceServer
from support.worker.process import DIGITS

NETWORK, INVALID, FORMAT, GONE = "NetworkError", "InvalidRequest", "UnsupportedFormat", "SourceNotFound"
ADAPTER = "InvalidAdapter"
STALL_DEADLINE_S, DEADLINE_S = 6.0, 60.0
TENSORS = {
    name.replace("base_model.model.", "transformer."): tensor
    for name, tensor in load_file(DIGITS / "loras" / "stripes" / "adapter_model.safetensors").items()
}
# Addresses that are always refused; the second stands for a whole network.
NEVER = ("169.254.169.254", "169.254.0.0/16", "0.0.0.0", "224.0.0.1", "255.255.255.255", "100.100.100.200")
# A resolver as an attacker has it: it gives names two addresses, in turn or at once.
RESOLVER = """
import socket
from pathlib import Path

_resolve, _connect, _asked = socket.getaddrinfo, socket.socket.connect, {}


def getaddrinfo(host, port, *arguments, **options):
    if not isinstance(host, str) or not host.endswith(".rebinding.example"):
        return _resolve(host, port, *arguments, **options)
    turns = host.partition(".")[0].split("-then-")
    _asked[host] = _asked.get(host, 0) + 1
    turn = turns[min(_asked[host], len(turns)) - 1].split("-and-")
    found = [socket.inet_ntoa(bytes.fromhex(address)) for address in turn]
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


def connect(self, address):
    if isinstance(address, tuple):
        with Path(__file__).with_name("connections").open("a") as file:
            file.write(f"{address[0]} {address[1]}\\n")
    return _connect(self, address)


socket.getaddrinfo, socket.socket.connect = getaddrinfo, connect
"""


class Hostile(NamedTuple):
    """The `source` of a put, its deadline, and its allowed results: a refusal with one of `codes`, or a load.

    `loads` is True if it must load, False if it must not, and None if both are right.
    """

    kind: str
    source: dict[str, Any]
    codes: frozenset[str]
    loads: bool | None = False
    deadline_s: float = DEADLINE_S


class Lair:
    """A server and folders to which hostile sources lead."""

    def __init__(self, folder: Path, server: SourceServer) -> None:
        self.folder, self.server = folder, server
        self.claims, self.files = folder / "claims", folder / "files"
        for place in (self.claims / "styles", self.files, folder / "resolver", folder / "cache"):
            place.mkdir(parents=True)
        (folder / "resolver" / "sitecustomize.py").write_text(RESOLVER)
        self._number = 0

    def draw(self, rng: random.Random) -> Hostile:
        """Return the next source, of a random kind."""
        self._number += 1
        return rng.choice(KINDS)(rng, self)

    def serve(self, served: Served) -> str:
        """Let the server answer with `served` at a new path, and return that path."""
        path = f"/{self._number}/{len(self.server.files)}.safetensors"
        self.server.files[path] = served
        return path

    def place(self, name: str) -> Path:
        """Return a path in `files` that has the current source's number and `name`; nothing is made there."""
        return self.files / f"{self._number}-{name}"

    def connections(self) -> set[str]:
        """Return the addresses that fetches connected to."""
        with suppress(FileNotFoundError):
            return {line.partition(" ")[0] for line in (self.folder / "resolver" / "connections").read_text().splitlines()}
        return set()


def good(rng: random.Random) -> bytes:
    """Return an adapter of the digits model with the same tensors each time, and other metadata."""
    return save(TENSORS, metadata={"drawn": str(rng.random())})


def over_http(url: str, served: Served | None = None) -> dict[str, Any]:
    return {"http": {"url": url, "sha256": served.sha256 if served else "0" * 64}}


def refused_address(rng: random.Random) -> str:
    """Return an address that every source must refuse, in one of the notations that lead to it."""
    network = ipaddress.ip_network(rng.choice(NEVER))
    inner = int(network[rng.randrange(network.num_addresses)])
    plain = str(ipaddress.ip_address(inner))
    forms = {
        "plain": plain, "number": str(inner), "hexadecimal": hex(inner), "octal": ".".join(f"0{int(part):o}" for part in plain.split(".")),
        "mapped": f"[::ffff:{plain}]", "translated": f"[::ffff:0:{plain}]", "NAT64": f"[64:ff9b::{plain}]",
        "6to4": f"[{ipaddress.IPv6Address(0x2002 << 112 | inner << 80 | 1)}]", "ISATAP": f"[2606:2800:220:1::5efe:{plain}]",
        "Teredo": f"[{ipaddress.IPv6Address(0x2001 << 112 | 0x08080808 << 64 | (inner ^ 0xFFFFFFFF))}]",
    }  # fmt: skip
    return forms[rng.choice(list(forms))]


def at_an_address(rng: random.Random, lair: Lair) -> Hostile:
    url = f"{rng.choice(('http', 'https'))}://{refused_address(rng)}:{rng.choice((80, 443, lair.server.server_port))}/a.safetensors"
    source = over_http(url) if rng.random() < 0.7 else {"s3": {"uri": "s3://styles/a.safetensors", "endpoint": url.rpartition("/")[0]}}
    return Hostile("address", source, frozenset({NETWORK, INVALID}))


def at_a_name(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source at a name that resolves to a good address, and later or also to a refused one."""
    refused = ipaddress.ip_network(rng.choice(NEVER)).network_address
    joined = rng.choice(("-then-", "-and-"))
    name = f"7f000001{joined}{int(refused):08x}.rebinding.example"
    whole = Served(good(rng), break_after=50 if rng.random() < 0.5 else None)
    url = f"http://{name}:{lair.server.server_port}"
    if rng.random() < 0.3:
        # A library lists buckets and resolves names by itself.
        listing = {"s3": {"uri": f"s3://b{rng.randrange(1 << 40):x}/style/", "endpoint": url}}
        return Hostile("rebinding bucket", listing, frozenset({NETWORK, GONE}))
    path = lair.serve(whole)
    # In turn, the load succeeds while the first connection holds; a second connection resolves again and is refused.
    loads = None if joined == "-then-" else False
    return Hostile("rebinding", over_http(url + path, whole), frozenset({NETWORK}), loads)


def redirected(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source with a chain of redirects: to a good file, a refused address, another scheme, or its own beginning."""
    whole = Served(good(rng))
    hops = rng.randrange(1, 8)
    end = rng.choice(("good", "address", "scheme", "loop"))
    first = f"/{lair.serve(whole)[1:]}.first"
    target = {
        "good": list(lair.server.files)[-1], "address": f"http://{refused_address(rng)}/latest", "loop": first,
        "scheme": rng.choice(("file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1/", "data:,x", "//", "http://", "http://[")),
    }[end]  # fmt: skip
    for number in range(hops, 0, -1):
        path = first if number == 1 else f"{first}.{number}"
        lair.server.files[path] = Served(redirect=target)
        target = path
    # More than five are too many.
    loads = end == "good" and hops <= 5
    return Hostile(f"redirect to {end}", over_http(lair.server.url + first, whole), frozenset({NETWORK, INVALID}), loads)


def badly_served(rng: random.Random, lair: Lair) -> Hostile:
    content = good(rng)
    cut = rng.randrange(1, len(content))
    served, codes = rng.choice(
        [
            (Served(content, gate_after=cut), {"Timeout", NETWORK}),
            (Served(content, break_after=cut, ranges=False), {NETWORK}),
            (Served(content, length=len(content) + cut, ranges=False), {NETWORK}),
            (Served(content, length=cut), {"DigestMismatch"}),
            (Served(gzip.compress(content), headers={"Content-Encoding": "gzip"}), {NETWORK}),
            (Served(content, status=rng.choice((301, 401, 403, 404, 418, 500))), {NETWORK, "SourceUnauthorized", GONE}),
            (Served(content, headers={"Content-Length": "-1"}, length=False), {NETWORK}),
        ]
    )
    deadline_s = STALL_DEADLINE_S if served.gate_after is not None else DEADLINE_S
    return Hostile("badly served", over_http(lair.server.url + lair.serve(served), served), frozenset(codes), deadline_s=deadline_s)


def no_adapter(rng: random.Random) -> bytes:
    """Return bytes that are no safetensors file."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    return rng.choice(
        [
            b"", b"PK\x03\x04" + rng.randbytes(90), b"\x80\x02" + rng.randbytes(90), b"<!doctype html>" * 9, b"\xff" * 64,
            (1 << 40).to_bytes(8, "little") + b"{}", len(header).to_bytes(8, "little") + header,
            (9000).to_bytes(8, "little") + b"[" * 9000, (4).to_bytes(8, "little") + b"null", rng.randbytes(rng.randrange(1, 900)),
        ]
    )  # fmt: skip


def other_bytes(rng: random.Random, lair: Lair) -> Hostile:
    served = Served(no_adapter(rng))
    return Hostile("no adapter", over_http(lair.server.url + lair.serve(served), served), frozenset({FORMAT, ADAPTER}))


def on_a_hub(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source at a hub that answers with nonsense, or whose repository has names that lead elsewhere."""
    repo = f"org/r{rng.randrange(1 << 40):x}"
    names = ["../../etc/passwd.safetensors", "/etc/a.safetensors", "a\x00b.safetensors", "..", "x/../../a.safetensors"]
    lair.server.push(repo, {rng.choice(names): good(rng), "adapter_config.json": b"{}"})
    if rng.random() < 0.5:
        nonsense = [b"", b"[]", b"null", b"[" * 50_000, b'{"sha": 1}', b'{"sha": "x", "siblings": [1]}', b"\xff\xfe", b'{"siblings": {}}']
        lair.server.files[f"/api/models/{repo}"] = answer = Served(rng.choice(nonsense), headers={"Content-Type": "application/json"})
        lair.server.files[f"/api/models/{repo}/revision/main"] = answer
    # Names of a hub do not become names in the cache, so a file with a strange name may be loaded.
    return Hostile("hub", {"huggingFace": {"repo": repo}}, frozenset({NETWORK, ADAPTER, GONE, FORMAT}), None)


def local(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source at a path that holds no usable file: a pipe, socket, loop, device, folder, or huge sparse file.

    Other paths are too long or have a NUL character, and nothing is there.
    """
    place = lair.place(rng.choice(("pipe", "socket", "loop", "device", "folder", "long", "nul", "sparse")) + ".safetensors")
    kind = place.name.partition("-")[2].partition(".")[0]
    written = str(place)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        _bind(place)
    elif kind == "folder":
        place.mkdir()
        os.mkfifo(place / "adapter_model.safetensors")
    elif kind == "sparse":
        place.write_bytes((1 << 39).to_bytes(8, "little"))
        os.truncate(place, 1 << 40)
    elif kind in ("loop", "device"):
        place.symlink_to({"loop": place.name, "device": rng.choice(("/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem"))}[kind])
    else:
        written = {"long": f"/{'a' * 3000}.safetensors", "nul": "/a\x00b.safetensors"}[kind]
    return Hostile(f"path: {kind}", {"path": written}, frozenset({ADAPTER, GONE, FORMAT, INVALID}))


def _bind(place: Path) -> None:
    """Create a socket file at `place`, whose path may be longer than an address has room for. Nobody listens there."""
    folder = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{place.name}")
    os.close(folder)


def on_a_claim(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source whose link, or name, leads out of a claim."""
    outside = lair.place("outside.safetensors")
    outside.write_bytes(good(rng))
    link = lair.claims / "styles" / outside.name
    link.symlink_to(rng.choice((str(outside), os.path.relpath(outside, link.parent), "/etc/passwd")))
    path = rng.choice((link.name, f"../../files/{outside.name}", str(outside), f"x/../{link.name}"))
    return Hostile("claim", {"pvc": {"claimName": "styles", "path": path}}, frozenset({INVALID, GONE, ADAPTER}))


def swapped(rng: random.Random, lair: Lair) -> Hostile:
    """Return a source whose file a thread of `Swaps` keeps replacing."""
    place = lair.place("swapped.safetensors")
    place.write_bytes(good(rng))
    return Hostile("swapped", {"path": str(place)}, frozenset({ADAPTER, GONE, FORMAT}), None)


def ordinary(rng: random.Random, lair: Lair) -> Hostile:
    served = Served(good(rng), ranges=rng.random() < 0.5)
    return Hostile("ordinary", over_http(lair.server.url + lair.serve(served), served), frozenset(), True)


Draw = Callable[[random.Random, Lair], Hostile]
KINDS: list[Draw] = [
    *(at_an_address, at_a_name, redirected, badly_served, other_bytes, on_a_hub, local, on_a_claim, swapped, ordinary),
]


def swap(lair: Lair, rng: random.Random) -> None:
    """Replace the file of each swapped source once: by a good adapter, by other bytes, by a pipe, or by a link to /dev/zero."""
    for place in lair.files.glob("*-swapped.safetensors"):
        draft = place.with_suffix(".draft")
        with suppress(FileNotFoundError):
            draft.unlink()
        make = rng.choice(("good", "bad", "pipe", "link"))
        if make == "pipe":
            os.mkfifo(draft)
        elif make == "link":
            draft.symlink_to("/dev/zero")
        else:
            draft.write_bytes(good(rng) if make == "good" else b"\xff" * 64)
        draft.rename(place)
