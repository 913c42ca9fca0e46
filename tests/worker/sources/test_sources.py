# SPDX-License-Identifier: Apache-2.0
"""Forms of a source, the files that are taken from it, and addresses where none may be."""

import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.selection import adapter_files, model_files
from diffusion_worker.sources.source import HttpSource, HuggingFaceSource, PvcSource, S3Source, Source
from diffusion_worker.sources.transport import checked_client
from diffusion_worker.sources.transport_rules import Reach, allowed_addresses, why_refused
from support.sources.rig import SourceRig, adapter_bytes
from support.sources.servers import Served, SourceServer

SHA = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/loras/papercut", Source(path="/loras/papercut")),
        ("loras/a b=c", Source(path="loras/a b=c")),
        ("hf://org/name", Source(hugging_face=HuggingFaceSource("org/name"))),
        ("hf://org/name@v1.0", Source(hugging_face=HuggingFaceSource("org/name", revision="v1.0"))),
        ("hf://org/name@v1/x/a.safetensors", Source(hugging_face=HuggingFaceSource("org/name", revision="v1", file="x/a.safetensors"))),
        ("hf://org/name/styles/papercut", Source(hugging_face=HuggingFaceSource("org/name", subfolder="styles/papercut"))),
        ("s3://bucket/a/b.safetensors", Source(s3=S3Source("s3://bucket/a/b.safetensors"))),
        ("pvc://weights/sd/xl/", Source(pvc=PvcSource("weights", "sd/xl"))),
        ("pvc://weights", Source(pvc=PvcSource("weights", "."))),
        (f"https://host/f?sig=x#sha256={SHA.upper()}", Source(http=HttpSource("https://host/f?sig=x", SHA))),
        ('{"s3": {"uri": "s3://b/k", "endpoint": "https://minio"}}', Source(s3=S3Source("s3://b/k", endpoint="https://minio"))),
    ],
)
def test_a_text_stands_for_a_source(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found nothing"),
        ("ftp://host/f", "found the scheme 'ftp'"),
        ("file:///etc/passwd", "found the scheme 'file'"),
        ("hf://org", "expected hf://org/name@revision"),
        ("hf://org/name?x", "expected hf://org/name@revision"),
        ("s3:///key", "expected s3://bucket/key"),
        ("s3://user@bucket/key", "expected s3://bucket/key"),
        ("pvc:///x", "expected pvc://claim/path"),
        ("https://host/f", "expected the digest"),
        (f"https://host/f#sha1={SHA}", "expected the digest"),
        ("{", "expected a source as a JSON object"),
        ('{"path": "/x", "http": {"url": "u", "sha256": "s"}}', "found path and http"),
        ("{}", "found none"),
    ],
)
def test_a_text_that_is_no_source_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        parse_source(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "::ffff:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "2002:a9fe:a9fe::1",
        "::169.254.169.254",
        "::ffff:0:169.254.169.254",
        "64:ff9b:1::169.254.169.254",
        "64:ff9b:1:a9fe:a9:fe00::",
        "64:ff9b:1:a9:fe:a9fe::",
        "64:ff9b:1:7:a9:fea9:fe00:0",
        "2001:0:a9fe:a9fe::1",
        "2001:0:808:808::5601:5601",
        "2606:2800:220:1:0:5efe:169.254.169.254",
        "fd12::200:5efe:169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "fe80::1",
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
    ],
)
def test_no_source_is_at_a_link_local_metadata_unspecified_or_multicast_address(address: str) -> None:
    assert why_refused(ipaddress.ip_address(address), Reach.LOOPBACK) is not None


def addresses_of(network: str) -> st.SearchStrategy[ipaddress.IPv4Address]:
    return st.ip_addresses(network=network).map(lambda address: ipaddress.IPv4Address(int(address)))


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::1"]
PRIVATE = [
    *("10.0.0.7", "64:ff9b:1::93.184.216.34", "172.16.0.1", "192.168.1.1", "100.64.0.1", "240.0.0.1"),
    *("fd12::1", "fec0::1", "::ffff:10.0.0.7", "2002:a00:7::1"),
]
GLOBAL = [
    *("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "::ffff:0:93.184.216.34"),
    *("64:ff9b::93.184.216.34", "2002:5db8:d822::1"),
]


@pytest.mark.parametrize(
    ("address", "least"),
    [
        *((address, Reach.LOOPBACK) for address in LOOPBACK),
        *((address, Reach.PRIVATE) for address in PRIVATE),
        *((address, Reach.GLOBAL) for address in GLOBAL),
    ],
)
def test_an_address_is_within_the_reach_that_it_needs_and_no_smaller_one(address: str, least: Reach) -> None:
    assert [reach for reach in Reach if why_refused(ipaddress.ip_address(address), reach) is None] == [r for r in Reach if r >= least]


EMBEDDINGS: dict[str, Callable[[int], int]] = {
    "compatible": lambda inner: inner,
    "mapped": lambda inner: 0xFFFF << 32 | inner,
    "translated": lambda inner: 0xFFFF << 48 | inner,
    "NAT64": lambda inner: 0x64FF9B << 96 | inner,
    "NAT64 of one's own": lambda inner: 0x64FF9B0001 << 80 | inner,
    "6to4": lambda inner: 0x2002 << 112 | inner << 80 | 1,
    "Teredo's server": lambda inner: 0x2001 << 112 | inner << 64 | 0xF7F7F7F7,
    "Teredo's client": lambda inner: 0x2001 << 112 | 0x08080808 << 64 | (inner ^ 0xFFFFFFFF),
    "ISATAP": lambda inner: 0x2606_2800_0220_0001 << 64 | 0x5EFE << 32 | inner,
}


@pytest.mark.parametrize("form", EMBEDDINGS)
@given(inner=st.sampled_from(["0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "10.0.0.0/8"]).flatmap(addresses_of))
def test_an_address_of_ipv6_is_refused_at_least_as_the_one_that_it_stands_for(form: str, inner: ipaddress.IPv4Address) -> None:
    # :: and ::1 are special addresses. An operator's own prefix may be longer, which a first byte of zero shows.
    assume(int(inner) > 1 and (form != "NAT64 of one's own" or inner.packed[0]))
    outer = ipaddress.IPv6Address(EMBEDDINGS[form](int(inner)))
    for reach in Reach:
        if why_refused(inner, reach) is not None:
            assert why_refused(outer, reach) is not None, (outer, reach)


@pytest.mark.parametrize("host", ["169.254.169.254", "2852039166", "0xa9fea9fe", "0", "[::ffff:a9fe:a9fe]"])
def test_a_host_that_is_a_refused_address_in_other_words_is_refused(host: str) -> None:
    with pytest.raises(RequestError) as refused:
        allowed_addresses(host.strip("[]"), 80, Reach.LOOPBACK)
    assert refused.value.code is ErrorCode.NETWORK_ERROR
    assert "refused" in refused.value.message


def resolving_to(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Make host names resolve to these lists of addresses in turn, the last one again and again.

    Return a list that gets the names as they are resolved. Names that begin with a digit resolve as always.
    """
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *arguments: object, **options: object) -> object:
        if host[0].isdigit():
            return real(host, port, *arguments, **options)  # type: ignore[arg-type]
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[min(len(asked), len(answers)) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def local_client() -> httpx2.Client:
    return checked_client(allow_http=True, reach=Reach.LOOPBACK, read_timeout_s=5.0)


def test_a_name_that_resolves_to_a_refused_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, ["127.0.0.1", "169.254.169.254"])
    with local_client() as client, pytest.raises(RequestError, match="a link-local address"):
        client.get("http://metadata.example/")


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving_to(monkeypatch, ["127.0.0.1"], ["169.254.169.254"])
    with SourceServer().running() as server, local_client() as client:
        server.files["/a"] = Served(b"content")
        assert client.get(server.url.replace("127.0.0.1", "rebinding.example") + "/a").content == b"content"
    assert asked == ["rebinding.example"]


def test_the_weights_and_the_config_of_an_adapters_folder_are_taken_under_our_names() -> None:
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "other.safetensors", "step-10/adapter_model.safetensors"]
    assert adapter_files(names, "x") == {name: name for name in ("adapter_model.safetensors", "adapter_config.json")}
    assert adapter_files(["../lora.safetensors", "pytorch_lora_weights.safetensors"], "x") == {
        "adapter_model.safetensors": "pytorch_lora_weights.safetensors"
    }
    assert adapter_files(["a.safetensors", "b.safetensors"], "x", patterns=["b*"]) == {"adapter_model.safetensors": "b.safetensors"}


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        (["README.md"], ErrorCode.INVALID_ADAPTER, "found none"),
        (["adapter_model.bin"], ErrorCode.UNSUPPORTED_FORMAT, "'adapter_model.bin'"),
        (["a.safetensors", "b.safetensors"], ErrorCode.INVALID_ADAPTER, "found a.safetensors, b.safetensors"),
    ],
)
def test_an_adapters_folder_without_one_file_of_weights_is_refused(names: list[str], code: ErrorCode, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        adapter_files(names, "x")
    assert refused.value.code is code
    assert says in refused.value.message


MODEL = ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors", "tokenizer/merges.txt"]


def test_of_a_model_what_loading_reads_is_taken() -> None:
    others = [
        ".gitattributes",
        ".git/config.json",
        "README.md",
        "all_in_one.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "vae/model.onnx",
        "run.py",
    ]
    assert set(model_files(MODEL + others, "x")) == set(MODEL)
    only_variant = ["model_index.json", "unet/diffusion_pytorch_model.fp16.safetensors"]
    assert set(model_files(only_variant, "x")) == set(only_variant)


def test_patterns_choose_the_files_of_a_model_but_never_a_pickle_file_or_a_hidden_one() -> None:
    names = [*MODEL, "unet/../../x.json", "unet/x.bin", "unet/y.fp16.safetensors", ".git/config.json"]
    assert set(model_files(names, "x", patterns=["*.json", "unet/*"])) == set(MODEL[:3]) | {"unet/y.fp16.safetensors"}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["unet/config.json"], "found no model_index.json"),
        (["model_index.json", "unet/x.bin"], "pickle"),
        (["model_index.json", "unet/x.safetensors", "unet/x y.json"], "plain names"),
        (["model_index.json", "unet/x.safetensors", "/etc/x.json"], "plain names"),
        (["model_index.json", "unet/x.safetensors", "a\nb/x.json"], "plain names"),
        (["model_index.json", "unet/x.safetensors", "a/" * 9 + "x.json"], "plain names"),
    ],
)
def test_a_folder_that_is_no_model_or_has_names_that_are_paths_is_refused(names: list[str], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        model_files(names, "x", patterns=["*"] if "plain" in says else [])
    assert refused.value.code is ErrorCode.UNSUPPORTED_FORMAT
    assert says in refused.value.message


@pytest.fixture
def rig(tmp_path: Path) -> SourceRig:
    rig = SourceRig(tmp_path)
    (rig.claims / "styles" / "papercut").mkdir(parents=True)
    (rig.claims / "styles" / "papercut" / "adapter_model.safetensors").write_bytes(adapter_bytes())
    (rig.claims / "styles" / "one.safetensors").write_bytes(adapter_bytes())
    return rig


@pytest.mark.parametrize("path", ["papercut", "one.safetensors", "papercut/adapter_model.safetensors"])
async def test_an_adapter_on_a_claim_is_read_in_place(rig: SourceRig, path: str) -> None:
    fetched = await rig.adapter(Source(pvc=PvcSource("styles", path)))
    assert fetched.path == str(rig.claims / "styles" / path)
    assert not any(rig.cache.iterdir())
    assert (await rig.adapter(Source(path=fetched.path))).path == fetched.path


@pytest.mark.parametrize(
    ("claim", "path", "code"),
    [
        ("other", "x", ErrorCode.SOURCE_NOT_FOUND),
        ("styles", "nothing", ErrorCode.SOURCE_NOT_FOUND),
        ("../claims/styles", "papercut", ErrorCode.INVALID_REQUEST),
        ("..", "styles/papercut", ErrorCode.INVALID_REQUEST),
        ("styles", "../styles/papercut", ErrorCode.INVALID_REQUEST),
        ("styles", "/etc", ErrorCode.INVALID_REQUEST),
        ("styles", "away", ErrorCode.INVALID_ADAPTER),
        ("styles", "inner", ErrorCode.INVALID_ADAPTER),
        ("styles", "weights.bin", ErrorCode.UNSUPPORTED_FORMAT),
        ("styles", "empty", ErrorCode.INVALID_ADAPTER),
    ],
)
async def test_what_is_not_on_the_claim_or_leads_out_of_it_is_refused(
    rig: SourceRig, tmp_path: Path, claim: str, path: str, code: ErrorCode
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_model.safetensors").write_bytes(adapter_bytes())
    (rig.claims / "styles" / "away").symlink_to(outside)
    (rig.claims / "styles" / "inner").mkdir()
    (rig.claims / "styles" / "inner" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (rig.claims / "styles" / "weights.bin").write_bytes(b"x")
    (rig.claims / "styles" / "empty").mkdir()
    assert (await rig.refusal(Source(pvc=PvcSource(claim, path)))).code is code


async def test_a_path_with_a_nul_or_to_a_pipe_is_refused_when_it_is_put(rig: SourceRig, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    error = await rig.refusal(Source(path=str(tmp_path / "pipe.safetensors")))
    assert error.code is ErrorCode.INVALID_ADAPTER and "pipe.safetensors is a pipe, expected a regular file" in error.message
    assert (await rig.refusal(Source(path="/tmp/a\0b"))).code is ErrorCode.INVALID_REQUEST
    assert (await rig.refusal(Source(pvc=PvcSource("styles", "a\0b")))).code is ErrorCode.INVALID_REQUEST


async def test_a_model_on_a_claim_may_not_have_links_that_lead_out_of_it(rig: SourceRig, tmp_path: Path) -> None:
    folder = rig.claims / "styles" / "model" / "unet"
    folder.mkdir(parents=True)
    assert (await rig.model(Source(pvc=PvcSource("styles", "model")))).path == str(folder.parent)
    (folder / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(RequestError) as refused:
        await rig.model(Source(pvc=PvcSource("styles", "model")))
    assert refused.value.code is ErrorCode.SOURCE_NOT_FOUND
