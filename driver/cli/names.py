"""What stands in the place of DEVICE and MODEL on the command line: checked, and completed by the shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from driver.client.served import is_path
from driver.devices import device_class, names
from driver.errors import DeviceNotFound
from driver.importers.files import READERS, load

if TYPE_CHECKING:
    from driver.nn import Model


class DeviceName(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on, and not before
    """An installed device, "module:Class", and whatever else is allowed where it stands."""

    name = "device"

    def __init__(self, *more: str, served: bool = False) -> None:
        """`more`: other names. `served`: whether it may be the path of a socket."""
        self._more, self._served = more, served

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> str:
        """The name, of which there is a device."""
        if value in self._more or (self._served and is_path(value)):
            return value
        try:
            device_class(value)
        except DeviceNotFound as error:
            self.fail(str(error), param, context)
        return value

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        """Those that are installed."""
        if self._served and is_path(incomplete):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in (*names(), *self._more) if name.startswith(incomplete)]


def is_model(name: str) -> bool:
    """Whether it names a file that `driver.load` may know."""
    return Path(name).suffix in READERS


def loaded(path: Path) -> Model:
    """The model in a file. Raises UsageError when it cannot be read, ImportFailed when it is none."""
    try:
        return load(path)
    except OSError as error:
        raise click.UsageError(f"MODEL {str(path)!r}: {error.strerror}; give the path of a model file") from error
