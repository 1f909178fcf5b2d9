"""caching: a compilation in cache files is restored exactly as it was, or not at all.

The HAL's model files are code: a device must not restore a changed one. Its data files are constants: with a changed
one, a device refuses too, or it restores a model that computes other values, without a crash. A device may decline to
store a model; then the test is skipped with the device's reason.
"""

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

from burst import ErrorStatus, StatusError
from driver.client.device import connect
from driver.vts.bench import output_sizes
from driver.vts.burst import plain
from driver.vts.cache_files import (
    COUNTS,
    DESCRIPTORS,
    FAILS,
    FLOAT,
    QUANTISED,
    TOKENS,
    CacheFileSet,
    Change,
    KeptModel,
    check_refused,
    corrupted,
    extensions,
    flips,
    keep,
    kept_model,
    new_files,
    overwrite,
    truncations,
    with_counts,
    with_descriptor,
)
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.operations import prepared
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from driver.options import Cache
    from driver.vts.cases import Case
    from driver.vts.target import Target

    Changes = Callable[[Sequence[bytes]], Iterable[Change]]

_MOST_FILES = 32
_REFUSES = (ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE)


def tests(corruptions: int) -> Iterator[Test]:
    """corruptions: how many random ones; of each other kind a tenth of that, but at least eight."""
    some = max(8, corruptions // 10)
    yield Test("caching/number_of_files", number_of_files)
    for name in SAMPLES:
        yield Test(f"caching/save_and_restore/{name}", partial(save_and_restore, name))
    yield Test("caching/offset", offset)
    for way in COUNTS:
        yield Test(f"caching/counts/{way}", partial(other_counts, way))
    for kind in DESCRIPTORS:
        yield Test(f"caching/descriptor/{kind}", partial(other_descriptor, kind))
    for kind in TOKENS:
        yield Test(f"caching/token/{kind}", partial(wrong_token, kind))
    yield Test("caching/token/unknown", unknown_token)
    yield Test("caching/token/other_entry", token_of_other_entry)
    yield Test("caching/never_written", never_written)
    for name in (FLOAT, QUANTISED):
        yield Test(f"caching/truncated/{name}", partial(damaged, name, truncations))
        yield Test(f"caching/extended/{name}", partial(damaged, name, extensions))
        yield Test(f"caching/bit_flipped/{name}", partial(damaged, name, partial(flips, most=some)))
        yield Test(f"caching/corrupted/{name}", partial(damaged, name, partial(_at_random, most=corruptions // 2)))
    yield Test("caching/swapped", swapped)
    yield Test("caching/mixed", mixed)
    for kind, is_code in (("code", True), ("data", False)):
        yield Test(f"caching/changed_meanwhile/{kind}", partial(changed_meanwhile, is_code, some))
    for kind, is_code in (("code", True), ("data", False)):
        yield Test(f"caching/changed_while_saved/{kind}", partial(changed_while_saved, is_code, 4 * some))
    yield Test("caching/locked", locked)


def number_of_files(target: Target) -> None:
    """The device asks for at most 32 files of each kind, and for the same number from every client."""
    found = target.device.number_of_cache_files_needed()
    check(
        all(0 <= count <= _MOST_FILES for count in found),
        f"the device needs {found} cache files; each must be from 0 to {_MOST_FILES}",
    )
    with connect(target.name) as other:
        again = other.number_of_cache_files_needed()
        check(again == found, f"another client gets {again}, the first one {found}")


def save_and_restore(name: str, target: Target) -> None:
    """Restore from reused files: while the model is prepared, after it was freed, and twice at a time."""
    case = sample(name)
    with new_files(target) as files:
        files.fill_with_junk()
        with prepared(case, target, files.cache()) as model:
            if model.home.declined:
                skip(f"the device does not store this model: {model.home.declined}")
            entry = KeptModel(case, files, plain(model, case, target))
            entry.check_restored(target, "while the model is prepared")
        entry.check_restored(target, "after it was freed")
        with target.restored(case.model, files.cache()):
            entry.check_restored(target, "twice at a time")


def offset(target: Target) -> None:
    """Descriptors whose file offset is not 0 serve for saving and for restoring."""
    with new_files(target) as files:
        files.fill_with_junk()
        entry = keep(FLOAT, files, target)
        files.move()
        entry.check_restored(target, "with file offsets other than 0")


def _check_prepares(case: Case, cache: Cache, target: Target, what: str) -> None:
    """Check that the device prepares the model anyway, and reports that it stored nothing."""
    try:
        with prepared(case, target, cache) as model:
            plain(model, case, target)
            check(model.home.declined, f"{what}: the device reports that it stored the model")
    except StatusError as error:
        raise Failed(f"{what}: preparing gets {error.status.name}: {error}") from error


def other_counts(way: str, target: Target) -> None:
    """With too many files, too few, or files of the other kind nothing is stored or restored."""
    with kept_model(FLOAT, target) as entry:
        cache = with_counts(way, entry.files)
        if cache is None:
            skip("the counts would be those that the device needs")
        what = f"{len(cache.model_files)} model files and {len(cache.data_files)} data files"
        check_refused(entry, cache, target, what, allowed=_REFUSES)
        _check_prepares(entry.case, cache, target, what)


def other_descriptor(kind: str, target: Target) -> None:
    """With one descriptor that cannot be read and written nothing is stored or restored."""
    with kept_model(FLOAT, target) as entry:
        contents = entry.files.read()
        for number in range(len(contents)):
            what = f"{kind} for file {number}"
            with with_descriptor(kind, entry.files, number) as cache:
                check_refused(entry, cache, target, what)
        entry.check_restored(target, "with its own descriptors again")
        for number in range(len(contents)):
            with with_descriptor(kind, entry.files, number) as cache:
                _check_prepares(entry.case, cache, target, f"{kind} for file {number}")


def wrong_token(kind: str, target: Target) -> None:
    """With a token whose length is not 32 nothing is stored or restored."""
    with kept_model(FLOAT, target) as entry:
        cache = entry.files.cache(token=os.urandom(TOKENS[kind]))
        what = f"a token of {TOKENS[kind]} bytes"
        check_refused(entry, cache, target, what, allowed=_REFUSES)
        _check_prepares(entry.case, cache, target, what)


def unknown_token(target: Target) -> None:
    """The files are refused under an unknown token, and under one that differs in one bit."""
    with kept_model(FLOAT, target) as entry:
        token = entry.files.token
        for other in (os.urandom(len(token)), bytes(len(token)), token[:-1] + bytes([token[-1] ^ 1])):
            check_refused(entry, entry.files.cache(token=other), target, "an unknown token")
        entry.check_restored(target, "with its own token again")


def token_of_other_entry(target: Target) -> None:
    """The files of one compilation are refused under the token of another."""
    with kept_model(FLOAT, target) as one, kept_model(QUANTISED, target) as other:
        check_refused(one, one.files.cache(token=other.files.token), target, "the token of another compilation")
        check_refused(other, other.files.cache(token=one.files.token), target, "the token of another compilation")
        one.check_restored(target, "with its own token again")
        other.check_restored(target, "with its own token again")


def never_written(target: Target) -> None:
    """Empty files, and files that the device did not write, are refused under an unknown token."""
    with kept_model(FLOAT, target) as entry, CacheFileSet(entry.files.counts) as files:
        check_refused(entry, files.cache(), target, "empty files")
        files.write(entry.files.read())
        check_refused(entry, files.cache(), target, "copies of a compilation under another token")
        files.fill_with_junk()
        check_refused(entry, files.cache(), target, "files that the device did not write")


def damaged(name: str, changes: Changes, target: Target) -> None:
    """Each single change of a model file is refused; the undamaged files then restore the model."""
    with kept_model(name, target) as entry:
        contents = entry.files.read()
        for change in changes(contents):
            if change.content != contents[change.number]:
                _check_damaged(entry, contents, change, target)
        entry.files.write(contents)
        entry.check_restored(target, "undamaged again")


def _at_random(contents: Sequence[bytes], most: int) -> Iterator[Change]:
    return (corrupted(contents, seed) for seed in range(most))


def _check_damaged(entry: KeptModel, contents: Sequence[bytes], change: Change, target: Target) -> None:
    entry.files.write([change.content if n == change.number else content for n, content in enumerate(contents)])
    _check_changed(entry, target, change.what, is_code=entry.files.is_code(change.number))


def _check_changed(entry: KeptModel, target: Target, what: str, *, is_code: bool) -> None:
    if is_code:
        check_refused(entry, entry.files.cache(), target, what)
        return
    try:
        with target.restored(
            entry.case.model, entry.files.cache()
        ) as model:  # a changed data file may change the results
            target.bench.execute(model, entry.case, output_sizes(entry.case), target.patience)
    except StatusError as error:
        if error.status not in FAILS:
            raise Failed(f"{what}: restoring gets {error.status.name}, not GENERAL_FAILURE: {error}") from error


def swapped(target: Target) -> None:
    """Two files of a compilation are refused when they are exchanged."""
    with kept_model(FLOAT, target) as entry:
        contents = entry.files.read()
        pairs = [(i, j) for j in range(len(contents)) for i in range(j) if contents[i] != contents[j]]
        if not pairs:
            skip("this device has no two different files")
        for i, j in pairs:
            found = list(contents)
            found[i], found[j] = found[j], found[i]
            entry.files.write(found)
            _check_changed(entry, target, f"files {i} and {j} exchanged", is_code=entry.files.is_code(i))
        entry.files.write(contents)
        entry.check_restored(target, "undamaged again")


def mixed(target: Target) -> None:
    """A compilation with one file of another is refused, and so is one with all of them."""
    with kept_model(FLOAT, target) as one, kept_model(QUANTISED, target) as other:
        contents, others = one.files.read(), other.files.read()
        for number, content in enumerate(others):
            if content != contents[number]:
                _check_damaged(one, contents, Change(number, content, f"file {number} of another compilation"), target)
        one.files.write(others)
        has_code = any(one.files.is_code(n) for n, content in enumerate(others) if content != contents[n])
        _check_changed(one, target, "all files of another compilation", is_code=has_code)
        one.files.write(contents)
        one.check_restored(target, "undamaged again")


# ---- files that change or stay locked while the device restores ------------------------------------------------------

_IN_PLACE = 4  # pairs of damages to one file before another file replaces it
_ACTS = 5  # at least, for each restoring
_REST = 4e-3  # seconds at most between two changes


def changed_meanwhile(is_code: bool, rounds: int, target: Target) -> None:
    """While the device restores models, a thread repeatedly replaces, overwrites and truncates the files.

    From model files, the device restores exactly the model that it stored, or none; from data files, at least it does
    not crash.
    """
    with kept_model(FLOAT, target) as entry, kept_model(QUANTISED, target) as other:
        for _, cache in _changing(entry.files, other.files, rounds, is_code=is_code):
            _check_right_or_none(entry, cache, target, "with files that change meanwhile", is_code=is_code)
        entry.check_restored(target, "undamaged again")


def changed_while_saved(is_code: bool, rounds: int, target: Target) -> None:
    """While the device stores a model, a thread overwrites and truncates the files.

    Whatever they hold then, the device restores the model that it was given, or none.
    """
    what = "of files that changed while it stored them"
    with kept_model(FLOAT, target) as entry, kept_model(QUANTISED, target) as other:
        for damager, cache in _changing(entry.files, other.files, rounds, is_code=is_code, in_place=True):
            with prepared(entry.case, target, cache):
                pass
            with damager.still:
                _check_right_or_none(entry, cache, target, what, is_code=is_code)
        keep(FLOAT, entry.files, target).check_restored(target, "stored undisturbed")


def _changing(
    files: CacheFileSet, others: CacheFileSet, rounds: int, *, is_code: bool, in_place: bool = False
) -> Iterator[tuple[_FileDamager, Cache]]:
    """Yield files again and again, while a thread changes those of one kind. in_place: and does not replace them."""
    numbers = [n for n in range(len(files.fds)) if files.is_code(n) == is_code]
    if not numbers:
        skip(f"this device has no {'model' if is_code else 'data'} files")
    with _FileDamager(files, others, numbers, in_place=in_place) as damager:
        for tried in count():
            if tried >= rounds and damager.acts >= rounds * _ACTS:
                break
            check(damager.is_alive, "the kit cannot change its own files")
            with damager.cache() as cache:
                yield damager, cache


def _check_right_or_none(entry: KeptModel, cache: Cache, target: Target, what: str, *, is_code: bool) -> None:
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
    """Copies of the files in a folder, and a thread that damages some of them and repairs them again.

    It does nothing while another thread holds `still`.
    """

    def __init__(self, files: CacheFileSet, others: CacheFileSet, numbers: Sequence[int], *, in_place: bool) -> None:
        self._files, self._numbers, self._stop, self.still = files, numbers, threading.Event(), threading.Lock()
        self._replaces = not in_place
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
        """True if the thread still runs."""
        return self._thread.is_alive()

    def _path(self, number: int) -> Path:
        return Path(self._folder.name, str(number))

    @contextmanager
    def cache(self) -> Iterator[Cache]:
        """Yield the files that have these names now."""
        with ExitStack() as stack:
            fds = []
            for number in range(len(self._contents)):
                fds.append(os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC))
                stack.callback(os.close, fds[-1])
            yield self._files.cache(fds)

    def _work(self) -> None:
        random = np.random.default_rng(0)
        ways: list[Callable[[int, bytes], None]] = [*[self._write] * 2 * _IN_PLACE, self._cut]
        if self._replaces:
            ways = [*[self._write, self._cut] * _IN_PLACE, self._replace]
        for number, damage in cycle([(n, way) for n in self._numbers for way in ways]):
            for act in (damage, partial(self._mend, in_place=damage != self._replace)):
                with self.still:
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
