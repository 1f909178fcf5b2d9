"""What goes wrong with a library, and UnsupportedError for what it cannot compute.

DriverError
+-- LibraryMissing    (ImportError)
+-- LibraryFailed
"""

from __future__ import annotations

from driver.errors import DriverError


class LibraryMissing(DriverError, ImportError):
    """The library is not installed, has another version than the device needs, or lacks a part. Nothing was loaded."""


class LibraryFailed(DriverError):
    """A call of the library failed, or computed something wrong. What it was to make was not made."""

    status = 0  #: the library's number for what went wrong; 0 where there is none


class UnsupportedError(Exception):
    """The library cannot compute this operation exactly. Never leaves the device."""


def require(condition: object, reason: str) -> None:
    """Raises UnsupportedError unless `condition` holds."""
    if not condition:
        raise UnsupportedError(reason)
