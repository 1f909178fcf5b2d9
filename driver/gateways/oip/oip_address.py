"""Addresses as `burst serve --oip` takes them."""

from __future__ import annotations

from typing import NamedTuple

from driver.errors import DeviceFailed
from driver.gateways.door_address import DoorAddress

_HELP = "HOST:PORT, :PORT (this machine alone), unix:PATH, http://HOST:PORT or http+unix:PATH"


class OipAddress(NamedTuple):
    """One of them: gRPC or HTTP."""

    door: DoorAddress
    is_http: bool

    def with_port(self, port: int) -> str:
        """Return the address for people and clients, with the port that the kernel chose."""
        scheme = ("http+" if self.door.path else "http://") if self.is_http else ""
        return scheme + self.door._replace(port=port or self.door.port).place


def oip_address(text: str) -> OipAddress:
    """Parse an address. Raise DeviceFailed."""
    said, rest = f"--oip {text}", text.removeprefix("grpc://")
    is_http = rest.startswith("http")
    if rest.startswith(("unix:", "http+unix:")):
        return OipAddress(DoorAddress.of_owner(said, rest.split("unix:", 1)[1]), is_http)
    door = DoorAddress.of_tcp(said, rest.removeprefix("http://"))
    if not door:
        raise DeviceFailed(f"{said}: give {_HELP}")
    return OipAddress(door, is_http)
