"""The DEVICE and MODEL arguments of the command line: validation and shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from driver.client.served import is_path
from driver.devices import names, usable_class
from driver.errors import DeviceNotFound
from driver.importers.files import READERS, load

if TYPE_CHECKING:
    from driver.nn import Model


class DeviceName(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on, and not before
    """An installed device, "module:Class", or one of the extra names that a command allows."""

    name = "device"

    def __init__(self, *more: str, served: bool = False) -> None:
        """`more`: extra names. `served`: whether the path of a served device's socket is allowed."""
        self._more, self._served = more, served

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> str:
        """Returns the name; fails unless such a device exists."""
        if value in self._more or (self._served and is_path(value)):
            return value
        try:
            usable_class(value)
        except DeviceNotFound as error:
            self.fail(str(error), param, context)
        return value

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        """Completes the names of installed devices."""
        if self._served and is_path(incomplete):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in (*names(), *self._more) if name.startswith(incomplete)]


def is_model(name: str) -> bool:
    """True for a file name with a suffix that `driver.load` knows."""
    return Path(name).suffix in READERS


def loaded(path: Path) -> Model:
    """Loads a model. Raises UsageError if the file cannot be read, ImportFailed if it holds no valid model."""
    try:
        return load(path)
    except OSError as error:
        raise click.UsageError(f"MODEL {str(path)!r}: {error.strerror}; pass the path of a model file") from error
