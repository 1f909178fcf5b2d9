"""What the small HTTP servers of devices, gateways and demos know of a connection: its bounds, and whose it is."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

_NETWORK_BITS = _HOST_BITS = 64
MOST, MOST_OF_ACCOUNT = 32, 8  # connections
PATIENCE = 10.0
"""Seconds that a connection may take in all, from its first byte to the last of the answer."""


def is_misaddressed(host: str | None, sock: socket.socket) -> bool:
    """Return True for a request to a loopback address under a name of somebody else's.

    A page of that name's can have its name resolve to 127.0.0.1, and then read what a browser here gets. `host`: the
    Host field. `sock`: the connection. Programs send no Host, an address, or localhost.
    """
    if host is None or sock.family == socket.AF_UNIX or not _is_loopback(sock.getsockname()[0]):
        return False
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return not _is_loopback(name)
    except ValueError:
        return name.lower() != "localhost"


def _is_loopback(text: str) -> bool:
    """Return True for a loopback address, of IPv4 also as IPv6 has it. Raise ValueError for what is no address."""
    address = ip_address(text)
    return ((isinstance(address, IPv6Address) and address.ipv4_mapped) or address).is_loopback


MISADDRESSED = "this server is at a loopback address; ask for it as 127.0.0.1 or localhost"


def account_of(connection: socket.socket) -> Hashable:
    """Return who connected: a uid at a Unix socket, else a machine's address; TCP does not tell accounts apart."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])
    try:
        return machine_of(connection.getpeername()[0])
    except OSError:  # it has gone already
        return None


def machine_of(host: str) -> str:
    """Return what counts as the machine with an address: of IPv6 the network, in which a machine has 2**64 of them.

    Not on a link, where all machines have the same one.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        if not (address.is_link_local or address.is_loopback):
            return str(IPv6Network((int(address) >> _HOST_BITS << _HOST_BITS, _NETWORK_BITS)))
    return host
