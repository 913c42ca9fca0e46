# SPDX-License-Identifier: Apache-2.0
"""Forbidden locations of sources: schemes and addresses from which nothing is fetched. Holds no client."""

import enum
import ipaddress
import socket

from diffusion_worker.errors import ErrorCode, RequestError

# Metadata services, which give a machine's secrets to any of its processes; link-local ones are refused as such.
METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254")))
# IPv6 networks whose addresses stand for the IPv4 address in their last four bytes, and for nothing else.
EMBEDDING = tuple(map(ipaddress.ip_network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
# A translator's own prefix: /48 of these bytes, or a longer one below it (RFC 6052), each with the address at another place.
LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
PLACES_OF_NAT64 = ((6, 7, 9, 10), (7, 9, 10, 11), (9, 10, 11, 12), (12, 13, 14, 15))
# Bytes 8 to 11 of an ISATAP address, whose last four are one of IPv4.
ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Reach(enum.IntEnum):
    """The addresses that a source may be at; each value includes those before it. Metadata and link-local addresses are in none."""

    GLOBAL = 0
    PRIVATE = 1
    LOOPBACK = 2


_NEEDS_TOKEN = "which a source may have only if the worker has --control-token-file"
_LOOPBACK_NEEDS = {
    Reach.GLOBAL: f"a loopback address, {_NEEDS_TOKEN}",
    Reach.PRIVATE: "a loopback address, which needs --allow-http-sources",
    Reach.LOOPBACK: None,
}


def why_refused(address: Address, reach: Reach) -> str | None:
    """Return the rule that an address breaks, such as "a metadata address"; None if a source may be there.

    An IPv6 address is also judged by every IPv4 address that it may lead to.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inner(address)
        if any(address in network for network in EMBEDDING) and inner:
            return why_refused(inner[0], reach)
        if (why := next(filter(None, (why_refused(each, reach) for each in inner)), None)) is not None:
            return why
    return _why_never(address) or _why_out_of_reach(address, reach)


def _why_never(address: Address) -> str | None:
    if address in METADATA:
        return "a metadata address"
    if address.is_unspecified or (address.version == 4 and int(address) >> 24 == 0):
        return "an unspecified address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "a multicast address"
    return None


def _why_out_of_reach(address: Address, reach: Reach) -> str | None:
    if address.is_loopback:
        return _LOOPBACK_NEEDS[reach]
    # Versions of Python differ about these three. What a 6to4 address leads to has been judged.
    local = isinstance(address, ipaddress.IPv6Address) and (address.is_site_local or address in LOCAL_NAT64)
    leads_on = isinstance(address, ipaddress.IPv6Address) and address.sixtofour is not None
    if (local or not (address.is_global or leads_on)) and reach < Reach.PRIVATE:
        return f"a private address, {_NEEDS_TOKEN}"
    return None


def _inner(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses to which an IPv6 address may lead."""
    raw = address.packed
    if any(address in network for network in EMBEDDING):
        # :: and ::1 are addresses of their own.
        return [ipaddress.IPv4Address(raw[12:])] if int(address) > 1 else []
    found = list(address.teredo or ()) + ([address.sixtofour] if address.sixtofour else [])
    if address in LOCAL_NAT64:
        # The prefix may have any of these lengths. A first byte of zero shows that it has another one.
        found += [ipaddress.IPv4Address(bytes(raw[place] for place in places)) for places in PLACES_OF_NAT64 if raw[places[0]]]
    if raw[8:12] in ISATAP:
        found.append(ipaddress.IPv4Address(raw[12:]))
    return found


def allowed_addresses(host: str, port: int, reach: Reach) -> list[str]:
    """Look up a host's distinct addresses and check all of them, for a connection to one of them without a second lookup.

    Raises:
        RequestError: NetworkError, the name cannot be resolved, or a source may not be at one of the addresses.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RequestError(ErrorCode.NETWORK_ERROR, f"host {host!r}: its name cannot be resolved") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if why := why_refused(ipaddress.ip_address(address.partition("%")[0]), reach):
            raise RequestError(ErrorCode.NETWORK_ERROR, f"host {host!r}: refused, because its address {address} is {why}")
    return addresses


def require_scheme(scheme: str, *, allow_http: bool, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
    """Raise RequestError with `code` for a scheme other than https, or http where that is allowed."""
    if scheme != "https" and not (allow_http and scheme == "http"):
        raise RequestError(code, f"expected a source over https, found {scheme!r}")
