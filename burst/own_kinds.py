"""Kinds of memory that a driver alone knows: their names, and what a process that is a device opens them with.

Such memory travels as [kind, bytes, [fields…]] and a descriptor. Only the device's driver can say what that means, so
the engine registers the driver's kinds here, once for its process, and `Memory.from_wire` opens them on every path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from fmq.errors import InvalidDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Opener = Callable[["HandleDescription", int], Any]

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_LONGEST_NAME = 100
MOST_FIELDS = 16
_openers: dict[str, Opener] = {}


class HandleDescription(NamedTuple):
    """A description of memory, which travels beside its descriptor."""

    kind: str
    nbytes: int
    fields: tuple[int, ...]


def is_own_kind(kind: str) -> bool:
    """Return True if it is named as a driver's own kind of memory: "com.example.heap"."""
    return len(kind) <= _LONGEST_NAME and _NAME.fullmatch(kind) is not None


def described(kind: str, *given: Any) -> HandleDescription:
    """Return the description, checked: bytes and fields, which may be anything. Raise InvalidDescriptor, a
    ValueError.
    """
    if not is_own_kind(kind):
        raise InvalidDescriptor(f"kind={kind!r:.120}: small letters, digits and _, with a dot, as in com.example.heap")
    if len(given) != len(HandleDescription._fields) - 1:
        raise InvalidDescriptor(f"{given!r:.80} does not describe memory of kind {kind}: [bytes, [fields…]]")
    nbytes, fields = given
    if type(nbytes) is not int or not 0 < nbytes < 2**63:
        raise InvalidDescriptor(f"nbytes={nbytes!r:.40}: a whole number above 0 and below 2**63")
    if not isinstance(fields, list | tuple) or len(fields) > MOST_FIELDS:
        raise InvalidDescriptor(f"fields={fields!r:.80}: at most {MOST_FIELDS} whole numbers")
    for n, field in enumerate(fields):
        if type(field) is not int or not -(2**63) <= field < 2**63:
            raise InvalidDescriptor(f"fields[{n}]={field!r:.40}: a whole number of 64 bits, with a sign")
    return HandleDescription(kind, nbytes, tuple(fields))


def register_kinds(kinds: Iterable[str], opener: Opener) -> None:
    """Make this process a device with these kinds. `opener` gets what a client described, checked, and a descriptor
    that it owns, and returns a `burst.Memory`. It raises StatusError.

    Raise ValueError for a name that is not a driver's own.
    """
    for kind in kinds:
        if not is_own_kind(kind):
            raise ValueError(f"own_memory_kinds: {kind!r:.120} is not named like an extension: com.example.heap")
        _openers[kind] = opener


def opener_of(kind: str) -> Opener | None:
    """Return what opens memory of that kind in this process; None: it does not know it."""
    return _openers.get(kind)


def registered_kinds() -> list[str]:
    """Return the kinds that this process knows besides those of `burst.memory.KINDS`."""
    return list(_openers)
