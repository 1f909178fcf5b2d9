"""Loads the shared library of a driver and checks the table of functions that it exports.

This file imports nothing of ours, so that it can also run as a program: `python table.py LIBRARY` loads one, and prints
what its table says. Loading runs code of the library, which may crash or never return. So the processes of a client and
of a service start that program (`driver.devices.library.description`) and never load a library themselves.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cffi import FFI

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER = Path(__file__).with_name("burst_device.h")
REMEDY = "build it with the header in the folder that `python -m driver.devices.library --include` prints"
_MARKS = "/* cffi reads from here on", "/* cffi reads up to here. */"
_REQUIRED = ("open", "close", "supported", "prepare", "release", "bind", "unbind", "execute", "output_shape")
_TOGETHER = (
    ("allocate", ("free_buffer", "copy_from", "copy_to")),
    ("map_memory", ("free_buffer", "copy_from", "copy_to")),
    ("configure_burst", ("end_burst",)),
    ("improve", ("improves_after",)),
    ("improves_after", ("improve",)),
)
"""Functions that a driver has together, or not at all."""
OPTIONAL = (
    *("explain", "cancel", "capabilities", "allocate", "host_memory", "map_memory", "save", "improve", "burst_began"),
    *("burst_ended", "rest", "rest_model", "configure_burst", "free_memory"),
)
TYPES = {1: "OTHER", 2: "CPU", 3: "GPU", 4: "ACCELERATOR"}
_MOST_SLOTS, _LONGEST_QUANTUM_NS, _MOST_FILES = 1024, 10 * 10**9, 32
_LONGEST_NAME, _MOST_NAMES, _LONGEST_PATH = 100, 64, 4096
_EXTENSION = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")

ffi: Any = FFI()


class LibraryFault(ValueError):
    """A library cannot be used as a device. The text says why, and what to do."""


def declarations() -> str:
    """Return the part of the header that cffi reads."""
    text = HEADER.read_text()
    begin, end = map(text.index, _MARKS)
    return text[begin:end]


ffi.cdef(declarations())
_exported = FFI()
_exported.cdef("const void *burst_device_get(uint32_t abi);")


def load(path: str, note: Callable[[str], object] = lambda _: None) -> tuple[Any, Any]:
    """Return the checked table of a library, and what keeps the library loaded. `note`: called with what is done next.

    The table is our own copy: what the driver does not know is NULL or 0 in it.

    Raise LibraryFault.
    """
    note("loading it")
    try:
        library: Any = _exported.dlopen(path)
    except OSError as error:
        raise LibraryFault(f"it cannot be loaded: {error}") from error
    try:
        get = library.burst_device_get
    except AttributeError:
        raise LibraryFault(
            'it does not export burst_device_get: declare the function as extern "C" in C++, and with '
            '__attribute__((visibility("default"))) where symbols are hidden'
        ) from None
    note("burst_device_get")
    found = ffi.cast("const burst_device_table *", int(_exported.cast("uintptr_t", get(_abi()))))
    note("reading its table")
    return _checked(found), library


@cache
def _abi() -> int:
    found = re.search(r"#define BURST_DEVICE_ABI (\d+)", HEADER.read_text())
    assert found
    return int(found[1])


def _checked(found: Any) -> Any:
    if found == ffi.NULL:
        raise LibraryFault(f"burst_device_get({_abi()}) returned NULL: it does not speak that ABI; {REMEDY}")
    if found.abi != _abi():
        raise LibraryFault(f"its table says abi {found.abi}, this Burst speaks {_abi()}; {REMEDY}")
    needed = ffi.offsetof("burst_device_table", "explain")
    if found.size < needed:
        raise LibraryFault(
            f"its table says size {found.size}, but the required functions end at {needed}: set it to "
            "sizeof(burst_device_table)"
        )
    if found.size % ffi.alignof("burst_device_table"):
        raise LibraryFault(
            f"its table says size {found.size}, which ends within a field: set it to sizeof(burst_device_table)"
        )
    table = ffi.new("burst_device_table *")
    ffi.memmove(table, found, min(found.size, ffi.sizeof("burst_device_table")))
    missing = [name for name in _REQUIRED if getattr(table, name) == ffi.NULL]
    for name, others in _TOGETHER:
        if getattr(table, name) != ffi.NULL:
            missing += [other for other in others if getattr(table, other) == ffi.NULL and other not in missing]
    if missing:
        is_one = len(missing) == 1
        raise LibraryFault(
            f"{', '.join(missing)} {'is' if is_one else 'are'} NULL in its table: write {'it' if is_one else 'them'}"
        )
    _check_numbers(table)
    return table


def _check_numbers(table: Any) -> None:
    if table.type not in TYPES:
        raise LibraryFault(f"its type is {table.type}: one of burst_device_type, {min(TYPES)} to {max(TYPES)}")
    if table.slots > _MOST_SLOTS:
        raise LibraryFault(f"its slots are {table.slots}: executions at once, from 0 to {_MOST_SLOTS}")
    if table.quantum_ns > _LONGEST_QUANTUM_NS:
        raise LibraryFault(f"its quantum_ns is {table.quantum_ns}: from 0 to {_LONGEST_QUANTUM_NS}")
    if max(table.n_code_files, table.n_data_files) > _MOST_FILES:
        raise LibraryFault(
            f"its compilations are {table.n_code_files} + {table.n_data_files} files: at most {_MOST_FILES} of a kind"
        )


def text(what: str, pointer: Any, most: int) -> str:
    """Return a text of the driver's. Raise LibraryFault."""
    if pointer == ffi.NULL:
        raise LibraryFault(f"{what} is NULL: give a text")
    raw = ffi.string(pointer, most + 1)
    try:
        found = str(raw.decode())
    except UnicodeDecodeError:
        raise LibraryFault(f"{what} is {raw!r:.80}: not UTF-8") from None
    if not found or len(raw) > most or not found.isprintable():
        raise LibraryFault(f"{what} is {found!r:.80}: 1 to {most} bytes that can be printed")
    return found


def texts(what: str, pointer: Any, most: int = _LONGEST_NAME) -> list[str]:
    """Return the texts up to NULL. Raise LibraryFault."""
    found: list[str] = []
    while pointer != ffi.NULL and pointer[len(found)] != ffi.NULL:
        if len(found) == _MOST_NAMES:
            raise LibraryFault(f"{what} has more than {_MOST_NAMES} entries: end it with NULL")
        found.append(text(f"{what}[{len(found)}]", pointer[len(found)], most))
    return found


def described(table: Any) -> dict[str, Any]:
    """Return a table as plain data. Raise LibraryFault."""
    needs = {name: texts(f"needs->{name}", pointer, _LONGEST_PATH) for name, pointer in _needs(table).items()}
    extensions = texts("extensions", table.extensions)
    for name in extensions:
        if not _EXTENSION.fullmatch(name):
            raise LibraryFault(
                f"extensions has {name!r}: a name is of small letters, digits and _, with at least one dot"
            )
    return {
        "name": text("name", table.name, _LONGEST_NAME),
        "version": text("version", table.version, _LONGEST_NAME),
        "type": TYPES[table.type],
        "slots": table.slots,
        "quantum_ns": table.quantum_ns,
        "extensions": extensions,
        "memory_kinds": texts("memory_kinds", table.memory_kinds),
        "needs": needs,
        "cache_files": [table.n_code_files, table.n_data_files] if table.keeps_compilations else None,
        "functions": [name for name in OPTIONAL if getattr(table, name) != ffi.NULL],
    }


def _needs(table: Any) -> dict[str, Any]:
    """Return the lists that lie within the size that they say."""
    if table.needs == ffi.NULL:
        return {}
    names = ("read_paths", "write_paths", "system_calls")
    ends = [ffi.offsetof("burst_needs", name) + ffi.sizeof("void *") for name in names]
    return {name: getattr(table.needs, name) for name, end in zip(names, ends, strict=True) if end <= table.needs.size}


def main() -> None:
    """Print one line for each thing that is begun, and then {"table": …} or {"fault": …} as JSON.

    What the library prints goes to the standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**what: object) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        table, _library = load(sys.argv[1], lambda word: tell(during=word))
        tell(table=described(table))
    except LibraryFault as fault:
        tell(fault=str(fault))


if __name__ == "__main__":
    main()
