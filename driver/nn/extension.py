"""Vendor extensions: operand types and operations that the HAL does not have, under the name of who defines them.

A device names the extensions that it knows. A model says which of them it uses: each has a prefix in that model, and
the code of one of its types or operations is `prefix << 16 | number`. Prefixes matter only where a model is plain data:
here operand types are `ExtensionType` objects, and operations are called by their full names, "vendor.extension.NAME".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidModel, did_you_mean

PREFIX_BITS = 16
"""A code's bits above these are the extension's prefix in the model."""
MOST_PREFIX = 2**15 - 1
MOST_TYPE_BYTES = 2**16
"""Largest element of an extension's operand type."""
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_WORD = re.compile(r"[A-Z][A-Z0-9_]*")
_LONGEST_NAME = 100


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a device reads where arrays have that dtype: bytes of booleans, and else the same."""
    return np.dtype(np.uint8) if dtype == np.bool_ else dtype


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """An operand type of an extension.

    extension: its name. number: of the type within it, from 0 to 65535. dtype: of one stored element; bytes that mean
    nothing to numpy are a void type, np.dtype("V3"). is_scalar: whether its operands have no dimensions.
    """

    extension: str
    number: int
    name: str
    dtype: np.dtype[Any]
    is_scalar: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.number < 1 << PREFIX_BITS and _WORD.fullmatch(self.name) and len(self.name) <= _LONGEST_NAME):
            raise InvalidModel(
                f"operand type {self.name!r:.80}, {self.number}: a name of capital letters, digits and _, and a number "
                "from 0 to 65535"
            )
        if self.dtype.hasobject or not 0 < self.dtype.itemsize <= MOST_TYPE_BYTES:
            raise InvalidModel(f"operand type {self.name}: {self.dtype} is no type of 1 to {MOST_TYPE_BYTES} bytes")

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype that a device reads, as `OperandType` has it."""
        return stored_dtype(self.dtype)

    @property
    def element_size(self) -> int:
        """Bytes of one stored element."""
        return self.dtype.itemsize

    @property
    def is_quantised(self) -> bool:
        """False: what an extension's types mean is said by its own parameters."""
        return False

    @property
    def since(self) -> int:
        """The HAL version 1.x that has extensions, as x."""
        return 2

    def __repr__(self) -> str:
        return f"<{self.extension}.{self.name}>"


@dataclass(frozen=True, slots=True)
class Extension:
    """A description of an extension, by a device that knows it.

    name: in small letters, with a dot: "vendor.extension". operations: their names; their numbers are their places.
    """

    name: str
    operand_types: tuple[ExtensionType, ...] = ()
    operations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        for word in self.operations:
            if not _WORD.fullmatch(word):
                raise InvalidModel(f"operation {word!r:.80} of {self.name}: a name of capital letters, digits and _")
        foreign = [kind.name for kind in self.operand_types if kind.extension != self.name]
        if foreign:
            raise InvalidModel(f"extension {self.name}: its operand type {foreign[0]} says that it is of another one")

    def type(self, name: str) -> ExtensionType:
        """Return the operand type of that name. Raise InvalidModel."""
        found = {kind.name: kind for kind in self.operand_types}
        if name not in found:
            raise InvalidModel(f"extension {self.name} has no operand type {name!r}{did_you_mean(name, found)}")
        return found[name]

    def operation(self, name: str) -> str:
        """Return the full name of an operation, for `Operation.type`. Raise InvalidModel."""
        if name not in self.operations:
            raise InvalidModel(f"extension {self.name} has no operation {name!r}{did_you_mean(name, self.operations)}")
        return f"{self.name}.{name}"


def check_name(name: object) -> None:
    """Check the name of an extension. Raise InvalidModel."""
    if not (isinstance(name, str) and len(name) <= _LONGEST_NAME and _NAME.fullmatch(name)):
        raise InvalidModel(f"extension {name!r:.120}: a name is of small letters, digits and _, with at least one dot")


OEM = Extension("hal.oem")
"""What a device names that takes OEM_OPERATION and the OEM operand types: HAL 1.0's way to operations of one's own."""
OEM_OPERATION = "OEM_OPERATION"


def extension_of(operation: str) -> str | None:
    """Return the extension that an operation belongs to, "hal.oem" for OEM_OPERATION; None: it is one of the HAL."""
    if operation == OEM_OPERATION:
        return OEM.name
    name, dot, _ = operation.rpartition(".")
    return name if dot else None


def operand_type_of(code: int, prefixes: Mapping[str, int], extensions: Mapping[str, Extension]) -> ExtensionType:
    """Return the operand type with that code in a model with these prefixes. `extensions`: those that are known, by
    name.

    Raise InvalidModel.
    """
    name, number = _found(code, prefixes)
    known = extensions.get(name)
    for kind in known.operand_types if known else ():
        if kind.number == number:
            return kind
    raise InvalidModel(f"operand type {code}: {_unknown(name, number, known)}")


def operation_of(code: int, prefixes: Mapping[str, int], extensions: Mapping[str, Extension]) -> str:
    """Return the full name of the operation with that code, with the arguments of `operand_type_of`."""
    name, number = _found(code, prefixes)
    known = extensions.get(name)
    if known and number < len(known.operations):
        return known.operation(known.operations[number])
    raise InvalidModel(f"operation {code}: {_unknown(name, number, known)}")


def _found(code: int, prefixes: Mapping[str, int]) -> tuple[str, int]:
    prefix, number = code >> PREFIX_BITS, code & (1 << PREFIX_BITS) - 1
    for name, its in prefixes.items():
        if its == prefix:
            return name, number
    raise InvalidModel(f"code {code} has the prefix {prefix}, which the model gives to no extension")


def _unknown(name: str, number: int, known: Extension | None) -> str:
    return f"extension {name} has no number {number}" if known else f"extension {name} is not known here"
