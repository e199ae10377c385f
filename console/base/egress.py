"""The one check that every outgoing URL passes: https, a host resolved once and pinned, no way into our own network.

Pure: the resolver is passed in, so that what was checked is what is connected to. Whoever connects uses the addresses
of the Permit and follows no redirect.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to addresses; raises OSError."""

METADATA = tuple(map(ip_network, ("169.254.0.0/16", "fd00:ec2::/32", "100.100.100.200/32", "168.63.129.16/32")))
"""Where clouds tell machines their secrets. Refused whatever is allowed."""

_NAT64 = ip_network("64:ff9b::/96")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_BLANKS = re.compile(r"[\x00-\x20\x7f\\]")
_MOST = 16  # addresses of one host


class EgressRefused(Exception):
    """The URL must not be called; the message says why and what would allow it."""


class Unresolved(Exception):
    """The host has no address now; later it may have one."""


@dataclass(frozen=True)
class Allow:
    """FANLIGHT_EGRESS_ALLOW: for these hosts and networks http, loopback and private addresses are let through."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def host(self, host: str) -> bool:
        return host in self.hosts

    def address(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self.networks)


@dataclass(frozen=True)
class Permit:
    """Where to connect: any of `addresses` and nothing else, whatever the host resolves to later."""

    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...]


def parse_allow(text: str) -> Allow:
    """Read a comma-separated list of hosts, addresses and CIDRs. Raises ValueError for an entry that is none."""
    hosts, networks = set(), []
    for part in (part.strip().lower() for part in text.split(",")):
        if not part:
            continue
        try:
            networks.append(ip_network(part.strip("[]")))
        except ValueError as error:
            if "/" in part or not _HOST.fullmatch(part):
                raise ValueError(f"{part} is neither a host nor a network ({error})") from None
            hosts.add(part)
    return Allow(frozenset(hosts), tuple(networks))


def base_url(text: str) -> str:
    """The part of an API's address before /v1, in one spelling. Raises EgressRefused for what is no such address."""
    parts = _split(text)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def check(url: str, allow: Allow, resolve: Resolve) -> Permit:
    """Decide about a URL. Raises EgressRefused, or Unresolved where its host has no address."""
    parts = _split(url)
    host = _host(parts)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = tuple(dict.fromkeys(resolve(host, port)))
        addresses = [ip_address(text.partition("%")[0]) for text in found]
    except (OSError, ValueError) as error:
        raise Unresolved(f"{host} could not be resolved: {error}") from None
    if not addresses:
        raise Unresolved(f"{host} has no address")
    for address in addresses:
        _check_address(host, address, allow)
    if parts.scheme == "http" and not (allow.host(host) or all(map(allow.address, addresses))):
        raise EgressRefused(f"{host} would be called by http: use https, or list it in FANLIGHT_EGRESS_ALLOW")
    return Permit(parts.scheme, host, port, tuple(map(str, addresses[:_MOST])))


def resolve_by_system(host: str, port: int) -> list[str]:
    """The system's resolver. Blocks for as long as it likes."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _split(url: str) -> SplitResult:
    """The URL's parts, if it is one of a kind that may be called at all."""
    if len(url) > 300 or _BLANKS.search(url) or not url.isascii():
        raise EgressRefused("An address has at most 300 plain characters and no blanks; write other names as xn--…")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise EgressRefused(f"This is no address: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise EgressRefused("An address starts with https://")
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise EgressRefused("An address holds no name or password: give the key by itself")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise EgressRefused("An address ends with its path: leave out ? and # and what follows")
    if not parts.hostname or port == 0:
        raise EgressRefused("An address names a host")
    return parts


def _host(parts: SplitResult) -> str:
    host = (parts.hostname or "").lower().rstrip(".")
    try:
        return str(ip_address(host))
    except ValueError:
        if len(host) > 253 or not _HOST.fullmatch(host):
            raise EgressRefused("An address names a host by letters, digits, hyphens and dots") from None
        return host


def _check_address(host: str, address: Address, allow: Allow) -> None:
    """Refuse an address that must not be reached. One that carries another inside is judged by both."""
    inner = _carried(address)
    if inner is not None:
        _check_address(host, inner, allow)
    if any(address.version == network.version and address in network for network in METADATA):
        raise EgressRefused(f"{host} is {address}, where clouds keep a machine's secrets: it is never called")
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        raise EgressRefused(f"{host} is {address}, a link-local or group address: it is never called")
    if inner is not None or address.is_global or allow.host(host) or allow.address(address):
        return
    kind = "a loopback" if address.is_loopback else "a private"
    raise EgressRefused(f"{host} is {address}, {kind} address: list it in FANLIGHT_EGRESS_ALLOW if it is meant")


def _carried(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for (mapped, 6to4, NAT64)."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
