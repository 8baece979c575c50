"""The addresses to which webhooks may be delivered: public ones, unless an operator allows more."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = (ipaddress.ip_network("64:ff9b::/96"),)
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider, and Alibaba's metadata
        "169.254.0.0/16",  # link-local, and the metadata of most clouds
        "168.63.129.16/32",  # Azure's metadata, which is outside of all reserved networks
        "192.0.0.0/24",  # Oracle's metadata, among others
        "192.88.99.0/24",  # relays of 6to4, which RFC 7526 withdrew
        "198.18.0.0/15",
        "::/96",
        "64:ff9b:1::/48",
        "fc00::/7",  # unique local, and Amazon's metadata
        "fe80::/10",
        "fec0::/10",
        "2001::/23",
        "2001:db8::/32",
    )
)
"""Networks that are refused beside those that are not global by Python's registry, whose copies differ by release."""


def is_address(host: str) -> bool:
    """Return whether the host of a URL is an IP address and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_open_address(text: str, allowed: Iterable[Network] = ()) -> bool:
    """Return whether this is an IP address that is public, or in one of the `allowed` networks."""
    if not is_address(text):
        return False
    meant = _meant_by(ipaddress.ip_address(text.partition("%")[0]))
    if any(one in network for network in allowed for one in meant if network.version == one.version):
        return True
    return all(map(_is_public, meant))


def _meant_by(address: Address) -> Sequence[Address]:
    """Return an address and the IPv4 addresses that it stands for. A NAT64 leads to its IPv4 address alone."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if any(address in network for network in _NAT64):
        return [ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)]
    embedded = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
    return [address, *(one for one in embedded if one is not None)]


def _is_public(address: Address) -> bool:
    is_mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if is_mapped or not address.is_global or address.is_multicast or address.is_reserved:
        return False
    return not any(address in network for network in _REFUSED if network.version == address.version)
