"""The settings of the live page: labels, allowed values, and messages for refused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import driver

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIORITIES = ("low", "medium", "high")
SPINS: dict[str, float | str] = {"sleep": 0.0, "50 us": 50e-6, "1 ms": 1e-3, "adaptive": "adaptive"}
MOST_RIVALS = 4
_SHOWN = 40  # characters of a value that is refused


@dataclass(frozen=True, slots=True)
class Setting:
    """One control: with `choices` a list, with `limits` a number, with neither a switch."""

    name: str
    label: str
    value: Any  #: the initial value
    help: str = ""
    choices: tuple[str, ...] = ()
    limits: tuple[float, float] | None = None
    unit: str = ""
    begins_anew: bool = True  #: whether the stream has to begin anew to take a change up

    def checked(self, value: object) -> object:
        """Return the value, or raise ValueError with a message for the page."""
        if self.choices:
            fits, remedy = isinstance(value, str) and value in self.choices, f"choose from {', '.join(self.choices)}"
        elif self.limits is not None:
            low, high = self.limits
            fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
            remedy = f"pass a number from {low:g} to {high:g}"
        else:
            fits, remedy = isinstance(value, bool), "pass true or false"
        if not fits:
            raise ValueError(f"{self.name}={value!r:.{_SHOWN}}: {remedy}")
        return value


def common(device: str) -> tuple[Setting, ...]:
    """Return the settings that both demos have. `device`: the one to begin with."""
    installed = [info.name for info in driver.devices() if not info.missing]
    devices = tuple(dict.fromkeys([*installed, device]))
    return (
        Setting("pause", "Pause", False, begins_anew=False),
        Setting("record", "Record", False),
        Setting("device", "Device", device, "the process that runs the network", choices=devices),
        Setting("spin", "Polling", "50 us", "how long both sides poll before they sleep", choices=tuple(SPINS)),
        Setting("priority", "Priority of this stream", "medium", choices=PRIORITIES),
        Setting(
            "rivals",
            "Competing programs",
            "0",
            "each loads the same device without a pause",
            choices=tuple(map(str, range(MOST_RIVALS + 1))),
            begins_anew=False,
        ),
        Setting("rival_priority", "Their priority", "low", choices=PRIORITIES, begins_anew=False),
    )


class Values:
    """The settings of one page and their values now. One thread changes them; any may read."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.settings = {setting.name: setting for setting in settings}
        self._now = 0, {setting.name: setting.value for setting in settings}

    @property
    def beginning(self) -> int:
        """Counts the changes that a stream has to begin anew for."""
        return self._now[0]

    def __getitem__(self, name: str) -> Any:
        return self._now[1][name]

    def change(self, wanted: object) -> None:
        """Apply all of `wanted`, or raise ValueError and apply nothing."""
        if not isinstance(wanted, dict) or not wanted:
            raise ValueError(f"set={wanted!r:.{_SHOWN}}: pass the names of settings with their values")
        for name, value in wanted.items():
            if name not in self.settings:
                raise ValueError(f"{name!r:.{_SHOWN}}: no such setting; choose from {', '.join(self.settings)}")
            self.settings[name].checked(value)
        beginning, values = self._now
        begins_anew = any(self.settings[name].begins_anew for name in wanted)
        self._now = beginning + begins_anew, values | wanted  # one assignment: the stream's thread may read meanwhile

    def held(self) -> Held:
        """Hold it for a stream that begins now."""
        return Held(self, *self._now)

    def plain(self) -> dict[str, Any]:
        """Return all of them."""
        return dict(self._now[1])


class Held:
    """Values as they were at some moment, but for those that act on a stream without its beginning anew."""

    def __init__(self, values: Values, beginning: int, then: dict[str, Any]) -> None:
        self.settings, self.beginning = values.settings, beginning
        self._values, self._then = values, then

    def __getitem__(self, name: str) -> Any:
        return self._then[name] if self.settings[name].begins_anew else self._values[name]

    @property
    def is_over(self) -> bool:
        """True if a stream has to begin anew."""
        return self.beginning != self._values.beginning
