"""Names of a package that are imported when they are first asked for (PEP 562): who uses few of them waits for few."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def late_names(
    package: str, homes: Mapping[str, str], folders: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    `homes`: module -> the public names that are taken from there, with blanks between them. `folders`: those of the
    names that are modules of the package as well. These are imported at once: an import binds a module to its name in
    the package the first time, and never again.
    """
    places = {name: module for module, names in homes.items() for name in names.split()}
    itself = sys.modules[package]

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=itself)
        value = getattr(import_module(places[name]), name)
        setattr(itself, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(itself), *places})

    for name in folders:
        import_module(f"{package}.{name}")
        vars(itself).pop(name, None)  # it is not there when the package is reloaded
    return get, names
