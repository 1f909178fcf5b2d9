"""The name of a device on the command line: it is looked up when one is given."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem


class DeviceName(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on, and not before
    """An installed device, "module:Class", a library's path, or one of the extra names that a command allows."""

    name = "device"

    def __init__(self, *more: str, served: bool = False) -> None:
        """`more`: extra names. `served`: whether the path of a served device's socket is allowed."""
        self._more, self._served = more, served

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> str:
        """Return the name, of a library its absolute path; fail unless such a device exists."""
        from driver.client.served_sockets import is_path
        from driver.devices import usable_class
        from driver.devices.library.description import absolute
        from driver.errors import DeviceNotFound

        if value in self._more or (self._served and is_path(value)):
            return value
        value = absolute(value)
        try:
            usable_class(value)
        except DeviceNotFound as error:
            self.fail(str(error), param, context)
        return value

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        """Complete the names of installed devices."""
        from driver.devices import names

        if "/" in incomplete:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in (*names(), *self._more) if name.startswith(incomplete)]
