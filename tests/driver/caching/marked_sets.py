"""Sets of files with the same mark in each, so that a mixed set would show."""

import os

from driver.runtime.cache.folder import About, Counts

COUNTS = Counts(2, 2)
NAMES = [(kind, index) for kind in ("model", "data") for index in range(2)]
TOKEN = bytes(range(32))


def wait_never():
    raise AssertionError("nobody else has the lock")


def fill(draft, mark, nbytes=0):
    """The mark and its place into each file; together `nbytes` if that is more."""
    for kind, index in NAMES:
        os.write(getattr(draft.files, kind)[index], f"{mark} {kind} {index} ".encode().ljust(nbytes // 4, b"."))


def replace(entry, mark, nbytes=0, on_wait=wait_never, model="ADD, 1 operation"):
    """Whether the new set is kept."""
    with entry.locked(on_wait, 20), entry.draft(COUNTS, About(model, "litert", "2.3")) as draft:
        fill(draft, mark, nbytes)
        return draft.commit()


def mark_of(entry):
    """Of the set that is there now; None when there is none."""
    with entry.opened(COUNTS) as files:
        if files is None:
            return None
        found = [os.pread(getattr(files, kind)[index], 100, 0).decode().split()[:3] for kind, index in NAMES]
    marks = {mark for mark, *_ in found}
    assert len(marks) == 1, f"a mixed set: {found}"
    assert [(kind, int(index)) for _, kind, index in found] == NAMES
    return marks.pop()


def lying(folder):
    """The names of the files that lie in a folder, without the letters of their tokens and their generations."""
    return sorted(path.name[64:].split(".")[0] or path.suffix for path in folder.path.iterdir())


WHOLE = sorted([".json", ".hits", ".lock", "10", "11", "20", "21"])
