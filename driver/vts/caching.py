"""caching: compilations that are kept in files. This driver version has none, and says so of each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.vts.kit import Test, skip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.vts.target import Target

_NAMES = ("save_and_restore", "wrong_number_of_files", "wrong_access_mode", "wrong_token", "corrupted", "replaced")


def tests() -> Iterator[Test]:
    """What Android's suite asks of a device that caches."""
    return (Test(f"caching/{name}", _missing) for name in _NAMES)


def _missing(_: Target) -> None:
    skip("this driver version has no compilation caching")
