"""Other people's files may be called `fmq`, `burst` or `driver`, too: finds them, and refuses to work with them.

pip writes a wheel's files over those of another package without a word, and runs nothing of the wheel's. So this looks
when a package of ours is imported, when the `burst` command starts, and when `burst doctor` runs.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DISTRIBUTION = "burst-engine"
#: How the file `__init__.py` of each package begins. Another one's does not, also where it has overwritten ours.
BEGINNINGS = {
    "fmq": '"""fmq moves bytes',
    "burst": '"""burst moves one execution',
    "driver": '"""driver knows what an execution means',
}
_RENAME = "rename that file or folder, or take its folder off PYTHONPATH"


def install_command(*extras: str) -> str:
    """Return the command that installs this distribution with these extras: an editable one is installed from its
    clone, as no index may have it."""
    import json  # like importlib.metadata: slow, and needed only if something is missing
    import shlex
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    words = f"[{','.join(extras)}]" if extras else ""
    try:
        direct = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        if direct.get("dir_info", {}).get("editable"):
            return f"pip install -e {shlex.quote(unquote(urlsplit(direct['url']).path) + words)}"
    except (metadata.PackageNotFoundError, ValueError):  # a frozen application; a file that was written by hand
        pass
    return f"pip install {shlex.quote(DISTRIBUTION + words)}"


@dataclass(frozen=True)
class Namesake:
    """Something else that has the name of one of our packages."""

    name: str
    place: str  #: its file
    shadows: bool  #: it is imported in our place; otherwise we are imported in its place
    remedy: str

    def __str__(self) -> str:
        words = "is imported in place of" if self.shadows else "is hidden by"
        return f"{self.place} {words} the package '{self.name}' of {DISTRIBUTION}"


def expect(*names: str) -> None:
    """Raise ImportError if something else would be imported under one of these names, with its file and a remedy.

    In a frozen application what would be imported lies in its archive, not in a file; its author has chosen it.
    """
    for name in () if getattr(sys, "frozen", False) else names:
        if found := imposter(name):
            raise ImportError(f"{found}: {found.remedy}", name=name, path=found.place)


def imposter(name: str) -> Namesake | None:
    """Return what `import` finds under that name, unless it is ours."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported by a program that gave it no spec
        spec = None
    place = spec.origin if spec else getattr(sys.modules.get(name), "__file__", None)
    if place is None:
        where = spec and spec.submodule_search_locations
        place = next(iter(where), "nothing") if where else "nothing"
    return None if _is_ours(name, Path(place)) else Namesake(name, place, True, _remedy(name, place))


def _is_ours(name: str, file: Path) -> bool:
    try:
        with file.open() as lines:
            return lines.readline().startswith(BEGINNINGS[name])
    except (OSError, UnicodeDecodeError):
        return False


def _remedy(name: str, place: str) -> str:
    if place == "nothing":
        return f"{install_command()} --force-reinstall"
    if others := _distributions_of(name):
        return (
            f"pip let {' and '.join(others)} write there, too: install one of them in an environment of its own, then"
            f" {install_command()} --force-reinstall"
        )
    return _RENAME


def _distributions_of(name: str) -> list[str]:
    """Other installed distributions that have files of that name at their top."""
    from importlib import metadata  # slow, and needed only if something is wrong

    owners: dict[str, None] = {}
    for distribution in metadata.distributions():
        record = distribution.read_text("RECORD") or ""  # `files` makes an object of each of its lines
        if any(line.startswith((f"{name}/", f"{name}.py,")) for line in record.splitlines()):
            owners[distribution.name] = None
    return [owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION]


def namesakes(folders: Iterable[str | Path] = ()) -> Iterator[Namesake]:
    """All namesakes: what is imported in our place, what lies in these folders (a program that lies there finds it
    first), what lies on the path behind us, and other distributions that have written into the same folder."""
    first = [Path(folder) for folder in folders]
    for name in BEGINNINGS:
        found = imposter(name)
        if found:
            yield found
        seen = {Path(found.place).resolve()} if found else set()
        for folder in (*first, *map(Path, sys.path)):
            for file in (folder / f"{name}.py", folder / name / "__init__.py"):
                if file.is_file() and file.resolve() not in seen and not _is_ours(name, file):
                    seen.add(file.resolve())
                    yield Namesake(name, str(file), folder in first, _RENAME)
        if not found:
            for owner in _distributions_of(name):
                yield Namesake(name, f"the distribution '{owner}'", False, f"{_remedy(name, '')}")
