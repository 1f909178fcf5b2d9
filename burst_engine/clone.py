"""A program that lies in a clone of the repository finds sources there that are not built: it gets what is installed.

Python looks first where the program lies. In the clone's folder that is this package, and fmq, burst and driver, all
without the modules in C. So each of them, before it imports anything else, becomes the installed package of its name.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_PACKAGES = ("burst_engine", "fmq", "burst", "driver")


def use_installed(name: str) -> None:
    """Import the installed package of that name in place of the one that is being imported, which lies in an unbuilt
    clone.

    Raise ImportError, with the remedy, if that cannot be done.
    """
    module = sys.modules[name]
    file = Path(module.__file__ or "")
    if not is_unbuilt(clone := file.parents[1]):
        return
    spec = _installed(name)
    if spec is None or not _has_the_init(spec, file):
        raise ImportError(_sentence(clone, spec), name=name, path=str(file))
    # The two __init__.py are the same, so what follows in this one is what the installed package would do.
    module.__spec__, module.__file__ = spec, spec.origin
    module.__path__ = spec.submodule_search_locations or []


def obstacle(clone: Path) -> str | None:
    """Return what keeps a program in this unbuilt clone from importing what is installed; None if nothing does."""
    for name in _PACKAGES:
        spec = _installed(name)
        if spec is None or not _has_the_init(spec, clone / name / "__init__.py"):
            return _sentence(clone, spec)
    return None


def is_unbuilt(folder: Path) -> bool:
    """Return True if the folder is a clone without its modules in C; of an editable installation, a finder has them."""
    if not (folder / "csrc").is_dir() or not (folder / "fmq/__init__.py").is_file():
        return False
    return not any(finder.find_spec("fmq._core", [str(folder / "fmq")]) for finder in sys.meta_path)


def _installed(name: str) -> ModuleSpec | None:
    """Return the spec that an import of that name finds outside of clones."""
    return PathFinder.find_spec(name, [folder for folder in sys.path if not (Path(folder) / "csrc").is_dir()])


def _has_the_init(spec: ModuleSpec, file: Path) -> bool:
    try:
        return spec.origin is not None and Path(spec.origin).read_bytes() == file.read_bytes()
    except OSError:
        return False


def _sentence(clone: Path, spec: ModuleSpec | None) -> str:
    stands = f"you stand in the clone {clone}, whose sources are not built"
    if spec is None:
        return f"{stands}, and no burst-engine is installed for {sys.executable}: pip install {clone}"
    return (
        f"{stands}, and the installed {spec.name} ({spec.origin}) was made from other sources: keep your program in"
        f" another folder, or install this clone: pip install {clone}"
    )


use_installed("burst_engine")  # this module comes before the others of its package
