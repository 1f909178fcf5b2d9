"""The configuration of a device's account in the home of a cell that has another uid, and cannot read the original."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkstemp

_NEW = ".new-"


def files_in(folder: Path) -> dict[Path, bytes]:
    """Return the contents of files by their paths in a folder; those that cannot be read are not there."""
    readable = (path for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK))
    return {path.relative_to(folder): path.read_bytes() for path in readable}


def write(folder: Path, files: dict[Path, bytes]) -> None:
    """Have these files alone in the folder of the configuration in a cell's home, as its uid.

    What a cell has left there is replaced and never opened: it may be a link, or a pipe that nobody reads. Another cell
    of the same uid finds old files or new ones. It can have them written elsewhere, where that uid may write anyway.
    """
    folders = {parent for path in files for parent in path.parents}
    for parent in (folder.parent, folder):
        if not _is_folder(parent):
            _remove(parent)
        parent.mkdir(exist_ok=True)
    for above, below, names in os.walk(folder):
        for found in (Path(above) / name for name in (*below, *names) if not name.startswith(_NEW)):
            if found.relative_to(folder) not in (folders if _is_folder(found) else files):
                _remove(found)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        fd, made = mkstemp(dir=(folder / path).parent, prefix=_NEW)
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(made, folder / path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
