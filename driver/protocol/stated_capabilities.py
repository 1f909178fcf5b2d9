"""What a driver states about its device's speed. The engine checks it, and the client checks what the engine sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from burst import GeneralFailure
from driver.interface import Capabilities, Performance
from driver.nn import OperandType
from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from driver.interface import Device

FIGURES = ("relaxed_scalar", "relaxed_tensor", "if_performance", "while_performance")
"""The fields of `Capabilities` that are one figure."""
_NO_CAPABILITIES = "driver.Capabilities, or None to have them measured"
_MOST_WORDS = 80


def checked(driver: str, stated: Any, extension_types: Sequence[str] = ()) -> Capabilities:
    """Return a driver's statements, as records of ours.

    Raise GeneralFailure that names the driver, the figure and its value.
    """
    if not isinstance(stated, Capabilities):
        raise _wrong(driver, "capabilities", stated, _NO_CAPABILITIES)
    if not isinstance(stated.operands, Mapping):
        raise _wrong(
            driver, "capabilities.operands", stated.operands, "a mapping of operand types to driver.Performance"
        )
    known = [*OperandType.__members__, *extension_types]
    for name in stated.operands:
        if name not in known:
            remedy = f"the HAL's name of an operand type, or that of a type of its extensions{_meant(name, known)}"
            raise _wrong(driver, "the operand type", name, remedy)
    operands = {str(name): _performance(driver, str(name), found) for name, found in stated.operands.items()}
    others: dict[str, Any] = {name: _optional(driver, name, getattr(stated, name)) for name in FIGURES}
    return Capabilities(operands, **others)


def _meant(name: object, known: Sequence[str]) -> str:
    return did_you_mean(name, known) if isinstance(name, str) else ""


def _optional(driver: str, name: str, found: Any) -> Performance | None:
    return None if found is None else _performance(driver, name, found)


def _performance(driver: str, name: str, found: Any) -> Performance:
    if not isinstance(found, tuple) or len(found) != len(Performance._fields):
        raise _wrong(driver, name, found, "a driver.Performance")
    exec_time, power = found
    if not _is_positive(exec_time):
        raise _wrong(
            driver, f"{name}: exec_time", exec_time, "a number above 0; the CPU in the client is 1.0, lower is better"
        )
    if power is not None and not _is_positive(power):
        raise _wrong(driver, f"{name}: power_usage", power, "a number above 0, or None where it is not known")
    return Performance(float(exec_time), None if power is None else float(power))


def _is_positive(found: Any) -> bool:
    try:
        return type(found) is not bool and 0 < float(found) < math.inf
    except (TypeError, ValueError):
        return False


def _wrong(driver: str, what: str, found: object, remedy: str) -> GeneralFailure:
    return GeneralFailure(f"the driver {driver!r} states {what} {found!r:.{_MOST_WORDS}}: state {remedy}")


def stated_by(device: Device) -> Capabilities | None:
    """Return the statements of a device's driver; None: it makes none. Raise GeneralFailure."""
    try:
        stated = device.capabilities
    except Exception as error:
        raise GeneralFailure(f"the driver {device.name!r} failed to state its capabilities: {error}") from error
    return None if stated is None else checked(device.name, stated, types_of(device))


def types_of(device: Device | type[Device]) -> list[str]:
    """Return the names of the operand types of its extensions."""
    return [kind.name for extension in device.extensions for kind in extension.operand_types]


def to_wire(stated: Capabilities | None) -> list[object]:
    """Return the values of an answer: nothing, or figures."""
    if stated is None:
        return []
    operands = [[name, *figure] for name, figure in stated.operands.items()]
    return [operands, *(None if (figure := getattr(stated, name)) is None else [*figure] for name in FIGURES)]


def from_wire(driver: str, values: Sequence[Any]) -> Capabilities | None:
    """Return the statements in the values of `to_wire`. Raise GeneralFailure for what makes no sense."""
    if not values:
        return None
    try:
        operands, *others = values
        named = {name: Performance(*figure) for name, *figure in operands}
        figures: list[Any] = [None if figure is None else Performance(*figure) for figure in others]
        stated = Capabilities(named, **dict(zip(FIGURES, figures, strict=True)))
    except (TypeError, ValueError) as error:
        raise _wrong(driver, "capabilities", values, _NO_CAPABILITIES) from error
    return checked(driver, stated, [*named])  # which types its extensions have, the device knows


def all_figures(capabilities: Capabilities) -> list[Performance]:
    """Yield the figures that there are."""
    return [f for f in chain(capabilities.operands.values(), (getattr(capabilities, n) for n in FIGURES)) if f]
