"""Home Assistant finds the server by itself: multicast DNS tells it of a service of the kind that it looks for."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from zeroconf import NonUniqueNameException
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from driver.errors import DeviceFailed

if TYPE_CHECKING:
    from driver.gateways.door_address import DoorAddress

KIND = "_wyoming._tcp.local."
_GROUP = "224.0.0.251", 5353


class Announcement:
    """While it is entered. Home Assistant knows a server again by its name: this machine's, and the port."""

    def __init__(self, address: DoorAddress) -> None:
        """`address`: at which other machines connect, with the port that was bound."""
        machine = socket.gethostname().partition(".")[0]
        self.name = f"burst-{machine}-{address.port}.{KIND}"
        self._address = address

    async def __aenter__(self) -> Self:
        """Announce the server. Raise DeviceFailed."""
        try:
            here = self._here()
            self._zeroconf = AsyncZeroconf(interfaces=[here])
        except OSError as error:
            why = error.strerror or error
            raise DeviceFailed(f"{self._address.said}: --zeroconf has no IPv4 address to announce ({why})") from error
        info = AsyncServiceInfo(KIND, self.name, parsed_addresses=[here], port=self._address.port)
        try:
            await (await self._zeroconf.async_register_service(info))
        except NonUniqueNameException:
            await self._zeroconf.async_close()
            raise DeviceFailed(f"{self._address.said}: --zeroconf: another machine is called {self.name} too") from None
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._zeroconf.async_unregister_all_services()
        await self._zeroconf.async_close()

    def _here(self) -> str:
        """Return an address of this machine that others can use; if all are served, that of the multicasts' network."""
        host = self._address.host
        place = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        if str(place[0]) != "0.0.0.0":  # noqa: S104 (it is compared with)
            return str(place[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_GROUP)  # sends nothing
            return str(probe.getsockname()[0])


__all__ = ["KIND", "Announcement"]
