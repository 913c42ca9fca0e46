# SPDX-License-Identifier: Apache-2.0
"""A library that resolves names by itself reaches checked addresses only: a real obstore through the relay, to a real server."""

import base64
import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import httpx2
import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from diffusion_worker.sources.relay import relay
from diffusion_worker.sources.transport_rules import Reach
from support.sources.servers import Served, SourceServer

EMPTY = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


@pytest.fixture
def server() -> Iterator[SourceServer]:
    with SourceServer().running() as server:
        server.files["/styles"] = Served(EMPTY)
        yield server


def resolve(monkeypatch: pytest.MonkeyPatch, address: str) -> list[str]:
    """Make every host name resolve to this address; return a list that gets the names as they are resolved."""
    asked: list[str] = []

    def resolve(host: str, port: int, *_: object, **__: object) -> object:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def listed(endpoint: str, proxy: str) -> int:
    store = S3Store(
        "styles",
        config={"endpoint": endpoint, "region": "us-east-1", "virtual_hosted_style_request": False, "skip_signature": True},
        client_options={"allow_http": True, "proxy_url": proxy, "timeout": "10s"},
        retry_config={"max_retries": 0},
    )
    return len(obstore.list(store).collect())


def test_a_listing_goes_to_the_address_that_was_checked(server: SourceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolve(monkeypatch, "127.0.0.1")
    with relay(Reach.LOOPBACK, allow_http=True) as proxy:
        assert listed(f"http://store.example:{server.server_port}", proxy) == 0
    # The name is resolved once; the second entry is the number from that.
    assert asked == ["store.example", "127.0.0.1"] and server.asked["/styles"] == 1


@pytest.mark.parametrize(
    ("address", "reach"), [("169.254.169.254", Reach.LOOPBACK), ("127.0.0.1", Reach.PRIVATE), ("10.0.0.7", Reach.GLOBAL)]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_that_leads_to_a_refused_address_is_connected_to_by_nobody(
    server: SourceServer, monkeypatch: pytest.MonkeyPatch, scheme: str, address: str, reach: Reach
) -> None:
    # The relay's own address is a number, which nothing checks.
    resolve(monkeypatch, address)
    with relay(reach, allow_http=True) as proxy, pytest.raises(BaseError):
        listed(f"{scheme}://rebinding.example:{server.server_port}", proxy)
    assert not server.asked


def test_a_tunnel_carries_bytes_both_ways(server: SourceServer) -> None:
    with relay(Reach.LOOPBACK, allow_http=False) as proxy:
        parts = urlsplit(proxy)
        secret = base64.b64encode(f"relay:{parts.password}".encode()).decode()
        place = f"127.0.0.1:{server.server_port}"
        with socket.create_connection((parts.hostname, parts.port), 10) as client, client.makefile("rb") as answer:
            client.sendall(f"CONNECT {place} HTTP/1.1\r\nProxy-Authorization: Basic {secret}\r\n\r\n".encode())
            assert answer.readline().startswith(b"HTTP/1.0 200") and answer.readline() == b"\r\n"
            client.sendall(f"GET /styles HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            assert answer.read().endswith(EMPTY)


def test_plain_http_is_refused_where_it_is_not_allowed(server: SourceServer) -> None:
    with relay(Reach.LOOPBACK, allow_http=False) as proxy, pytest.raises(BaseError):
        listed(server.url, proxy)
    assert not server.asked


def test_nobody_uses_a_relay_without_its_password(server: SourceServer) -> None:
    with relay(Reach.LOOPBACK, allow_http=True) as proxy:
        parts = urlsplit(proxy)
        for bare in (f"http://{parts.hostname}:{parts.port}", f"http://relay:wrong@{parts.hostname}:{parts.port}"):
            with httpx2.Client(proxy=bare, trust_env=False) as client:
                assert client.get(server.url + "/styles").status_code == 407
    assert not server.asked
    with closing(socket.socket()) as probe:
        assert probe.connect_ex((parts.hostname, parts.port)) != 0, "it ends with its block"
