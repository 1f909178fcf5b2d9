"""Models that a device has stored in cache files, for the tests of caching."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst import ErrorStatus, StatusError
from driver.interface import CacheFiles
from driver.vts.burst import plain
from driver.vts.cache_files import CacheFileSet
from driver.vts.kit import Failed, check, skip
from driver.vts.operations import prepared
from driver.vts.samples import sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.options import Cache
    from driver.vts.cases import Case
    from driver.vts.target import Target

FLOAT, QUANTISED = "convolution", "per_channel"
FAILS = (ErrorStatus.GENERAL_FAILURE,)


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model that the device has stored in files, and its outputs before that."""

    case: Case
    files: CacheFileSet
    expected: list[bytes]

    def check_restored(self, target: Target, what: str, cache: Cache | None = None) -> None:
        """Check that the restored model gives the same outputs on both paths."""
        try:
            with target.restored(self.case.model, cache or self.files.cache()) as model:
                check(
                    plain(model, self.case, target) == self.expected,
                    f"{what}: the restored model computes a different result",
                )
                with model.burst() as burst:
                    found = burst.run(*self.case.feeds, timeout=target.patience).outputs
                    same = [output.tobytes() for output in found] == self.expected
                    check(same, f"{what}: the restored model computes a different result in a burst")
        except StatusError as error:
            raise Failed(f"{what}: restoring gets {error.status.name}: {error}") from error


@contextmanager
def new_files(target: Target) -> Iterator[CacheFileSet]:
    """As many empty files as the device needs."""
    counts = CacheFiles(*target.device.number_of_cache_files_needed())
    if counts == (0, 0):
        skip("this device stores no compilations")
    with CacheFileSet(counts) as files:
        yield files


@contextmanager
def kept_model(name: str, target: Target) -> Iterator[KeptModel]:
    """One of the kit's models, stored in files of its own and freed on the device."""
    with new_files(target) as files:
        yield keep(name, files, target)


def keep(name: str, files: CacheFileSet, target: Target) -> KeptModel:
    """Store one of the kit's models in these files."""
    case = sample(name)
    with prepared(case, target, files.cache()) as model:
        if model.home.declined:
            skip(f"the device does not store this model: {model.home.declined}")
        return KeptModel(case, files, plain(model, case, target))


def check_refused(
    entry: KeptModel, cache: Cache, target: Target, what: str, allowed: Sequence[ErrorStatus] = FAILS
) -> None:
    """Check that restoring fails with one of these statuses."""
    try:
        with target.restored(entry.case.model, cache):
            pass
    except StatusError as error:
        wanted = " or ".join(status.name for status in allowed)
        if error.status not in allowed:
            raise Failed(f"{what}: restoring gets {error.status.name}, not {wanted}: {error}") from error
        return
    raise Failed(f"{what}: the device restores a model")
