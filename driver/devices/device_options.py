"""Options of a device, in its configuration file or given to its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from driver.config import configured, in_home

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Value = bool | int | str


class DeviceOption(NamedTuple):
    """An option of a device's configuration file.

    key: the runtime's name for it; "": it is Burst's own. choices: the values that are allowed, or their type.
    """

    key: str
    choices: tuple[Value, ...] | type
    default: Value | None = None

    def allows(self, value: object) -> bool:
        """Return True if it may have this value."""
        if isinstance(self.choices, tuple):
            return value in self.choices and type(value) is type(self.choices[0])
        return type(value) is self.choices and (self.choices is not int or value >= 0)  # type: ignore[operator]

    def __str__(self) -> str:
        if isinstance(self.choices, tuple):
            return " or ".join(map(repr, self.choices))
        return {bool: "true or false", int: "a number from 0", str: "a text"}[self.choices]


def configuration_of(device: str) -> Path:
    """Return the file with the options of a device."""
    return in_home(f"~/.config/burst/{device}.toml")


def chosen_options(device: str, options: Mapping[str, DeviceOption], given: Mapping[str, object]) -> dict[str, Value]:
    """Return the options: `given` ones, else those of the configuration file, else the defaults. Raise ValueError."""
    found: dict[str, Value] = {n: o.default for n, o in options.items() if o.default is not None}
    file = configuration_of(device)
    for source, values in ((str(file), configured(file)), (device, given)):
        for name, value in dict[str, Any](values).items():
            if name not in options:
                known = ", ".join(sorted(options))
                raise ValueError(f"{source}: {name} = {value!r} is no option of {device}; it has {known}")
            if not options[name].allows(value):
                raise ValueError(f"{source}: {name} = {value!r} must be {options[name]}")
            found[name] = value
    return found
