# SPDX-License-Identifier: Apache-2.0
"""Where no source may be: the schemes and the addresses that nothing is fetched from. Holds no client."""

import ipaddress
import socket

from diffusion_worker.errors import ErrorCode, RequestError

# Services that tell a machine's secrets to whoever asks from it, where they are not link-local anyway.
METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254")))
# An IPv4 address inside of one of IPv6: the last four bytes of these, and bytes two to six of 2002::/16.
NAT64 = ipaddress.ip_network("64:ff9b::/96")
COMPATIBLE = ipaddress.ip_network("::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def why_refused(address: Address) -> str | None:
    """Why no source may be at an address; None where it may."""
    if isinstance(address, ipaddress.IPv6Address) and (inner := _inner(address)) is not None and (why := why_refused(inner)):
        return why
    if address in METADATA:
        return "a metadata address"
    if address.is_unspecified or (address.version == 4 and int(address) >> 24 == 0):
        return "an unspecified address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "a multicast address"
    return None


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in NAT64 or (address in COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def allowed_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, all of which must be allowed. Raises RequestError (NetworkError)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RequestError(ErrorCode.NETWORK_ERROR, f"host {host!r}: its name cannot be resolved") from None
    texts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for text in texts:
        if why := why_refused(ipaddress.ip_address(text.partition("%")[0])):
            raise RequestError(ErrorCode.NETWORK_ERROR, f"host {host!r}: refused, {text} is {why}")
    return texts


def require_scheme(scheme: str, *, allow_http: bool, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
    """Raises RequestError with the code: another one where it is not what was asked for, but where that led."""
    if scheme != "https" and not (allow_http and scheme == "http"):
        raise RequestError(code, f"a source over {scheme!r}: refused, expected https")
