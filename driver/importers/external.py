"""Weights in other files than the model: only what the model names is copied.

A model names ranges of files beside it. Of each file the pages are copied in which they lie, one behind the other, and
the offsets in the model become those in the copy: never larger ones, so that they are written over the old ones, with
zeros in front. All that reads the model later finds files as it knows them.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.importers.header import ExternalRange
from driver.importers.sealed_files import open_beside, rewritten, sealed

_MOST_FILES = 256
_PAGE = 4096
Part = tuple[int, int]


def copy_external(model: Path, data: Array, ranges: Sequence[ExternalRange]) -> tuple[Array, dict[str, Array]]:
    """Return the model with the offsets that ranges have in the copies, and the copies by the model's names for the
    files.

    `data`: of the model at that path. Raise ImportFailed, ResourceExhaustedPersistent.
    """
    by_name, found = defaultdict[str, list[ExternalRange]](list), dict[str, Array]()
    for place in ranges:
        by_name[place.name].append(place)
    if len(by_name) > _MOST_FILES:
        raise ImportFailed(f"its weights lie in more than {_MOST_FILES} files")
    moved = list[tuple[Part, int]]()
    for name, places in by_name.items():
        with open_beside(model, name) as file:
            size = os.fstat(file.fileno()).st_size
            parts = _pages([place.check(size) for place in places], size)
            found[name] = sealed(file, name[:64], parts)
        moved += [(place.said, _place(place.offset, parts)) for place in places if place.said is not None]
    return rewritten(data, [(begin, b"%0*d" % (end - begin, number)) for (begin, end), number in moved]), found


def _pages(places: Sequence[Part], size: int) -> list[Part]:
    """Return those in which these places lie in a file of `size` bytes, adjacent ones as one; the first if none is
    named.
    """
    found: list[Part] = []
    for begin, end in sorted(place for place in places if place[0] < place[1]) or [(0, 1)]:
        first, last = begin // _PAGE * _PAGE, min(-(-end // _PAGE) * _PAGE, size)
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _place(offset: int, parts: Sequence[Part]) -> int:
    """Return where that byte of the file is in a copy of its parts; 0: not there, since nothing is read from it."""
    before = 0
    for begin, end in parts:
        if begin <= offset < end:
            return before + offset - begin
        before += end - begin
    return 0
