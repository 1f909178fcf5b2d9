"""caching: other processes change, or lock, the cache files while a device uses them."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from burst import StatusError
from driver.vts.bench import output_sizes
from driver.vts.burst import plain
from driver.vts.cache_files import overwrite
from driver.vts.kept_models import FAILS, FLOAT, QUANTISED, kept_model
from driver.vts.kit import Failed, check, skip
from driver.vts.operations import prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.options import Cache
    from driver.vts.cache_files import CacheFileSet
    from driver.vts.kept_models import KeptModel
    from driver.vts.target import Target

_IN_PLACE = 4  # pairs of damages to one file before another file replaces it
_ACTS = 5  # at least, for each restoring
_REST = 4e-3  # seconds at most between two changes


def changed_meanwhile(is_code: bool, rounds: int, target: Target) -> None:
    """While the device restores models, a thread repeatedly replaces, overwrites and truncates the files.

    From model files, the device restores exactly the model that it stored, or none; from data files, at least it does
    not crash.
    """
    with kept_model(FLOAT, target) as entry, kept_model(QUANTISED, target) as other:
        numbers = [n for n in range(len(entry.files.fds)) if entry.files.is_code(n) == is_code]
        if not numbers:
            skip(f"this device has no {'model' if is_code else 'data'} files")
        with _FileDamager(entry.files, other.files, numbers) as damager:
            for tried in count():
                if tried >= rounds and damager.acts >= rounds * _ACTS:
                    break
                check(damager.is_alive, "the kit cannot change its own files")
                with damager.cache() as cache:
                    _check_right_or_none(entry, cache, target, is_code=is_code)
        entry.check_restored(target, "undamaged again")


def _check_right_or_none(entry: KeptModel, cache: Cache, target: Target, *, is_code: bool) -> None:
    what = "with files that change meanwhile"
    try:
        with target.restored(entry.case.model, cache) as model:
            found = target.bench.execute(model, entry.case, output_sizes(entry.case), target.patience)
    except StatusError as error:
        if error.status not in FAILS:
            raise Failed(f"{what}, restoring gets {error.status.name}, not GENERAL_FAILURE: {error}") from error
        return
    if is_code:
        check(
            not found.status, f"{what}, the device restores a model that returns {found.status.name}: {found.message}"
        )
        same = [output.tobytes() for output in found.outputs] == entry.expected
        check(same, f"{what}, the device restores a model that computes a different result")


class _FileDamager:
    """Copies of the files in a folder, and a thread that damages some of them and repairs them again."""

    def __init__(self, files: CacheFileSet, others: CacheFileSet, numbers: Sequence[int]) -> None:
        self._files, self._numbers, self._stop = files, numbers, threading.Event()
        self.acts = 0  #: count of damages and repairs
        self._contents, self._others = files.read(), others.read()
        self._thread = threading.Thread(target=self._work, name="vts-damage", daemon=True)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="burst-vts-")
        for number, content in enumerate(self._contents):
            self._path(number).write_bytes(content)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._folder.cleanup()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _path(self, number: int) -> Path:
        return Path(self._folder.name, str(number))

    @contextmanager
    def cache(self) -> Iterator[Cache]:
        """The files that have these names now."""
        with ExitStack() as stack:
            fds = []
            for number in range(len(self._contents)):
                fds.append(os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC))
                stack.callback(os.close, fds[-1])
            yield self._files.cache(fds)

    def _work(self) -> None:
        ways, random = [self._write, self._cut] * _IN_PLACE + [self._replace], np.random.default_rng(0)
        for number, damage in cycle([(n, way) for n in self._numbers for way in ways]):
            for act in (damage, partial(self._mend, in_place=damage != self._replace)):
                act(number, self._contents[number])
                self.acts += 1
                if self._stop.wait(_REST * random.random()):
                    return

    def _write(self, number: int, content: bytes) -> None:
        with self._path(number).open("rb+") as file:
            file.seek(len(content) // 2)
            file.write(b"\xa5")

    def _cut(self, number: int, content: bytes) -> None:
        os.truncate(self._path(number), len(content) // 2)

    def _replace(self, number: int, _: bytes) -> None:
        self._put(number, self._others[number])

    def _put(self, number: int, content: bytes) -> None:
        new = self._path(number).with_suffix(".new")
        new.write_bytes(content)
        new.replace(self._path(number))

    def _mend(self, number: int, content: bytes, *, in_place: bool) -> None:
        if not in_place:
            self._put(number, content)
            return
        fd = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        try:
            overwrite(fd, content)
        finally:
            os.close(fd)


def locked(target: Target) -> None:
    """The files stay locked: the device still prepares models, and answers whether it can restore."""
    with kept_model(FLOAT, target) as entry:
        for number in range(len(entry.files.fds)):
            with _lock(entry.files, number):
                try:
                    with target.restored(entry.case.model, entry.files.cache()):
                        pass
                except StatusError as error:
                    status = error.status
                    check(status in FAILS, f"of locked files, restoring gets {status.name}, not GENERAL_FAILURE")
        entry.check_restored(target, "after they were locked")
        with _lock(entry.files, 0), prepared(entry.case, target, entry.files.cache()) as model:
            plain(model, entry.case, target)


@contextmanager
def _lock(files: CacheFileSet, number: int) -> Iterator[None]:
    fd = files.reopened(number, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
