"""Files that are refused in little memory."""

import tracemalloc

import pytest

import driver


def refused(read, data, reason=None, room=1 << 20):
    """`read` refuses `data` for `reason`, having taken not much more memory than a few times its size.

    It may try twice, because whoever is the first to use a part of the importer imports it.
    """
    most = room + 16 * len(data)
    assert _memory(read, data, reason) < most or _memory(read, data, reason) < most


def _memory(read, data, reason):
    """The most bytes that Python had at once for it."""
    tracemalloc.start()
    try:
        with pytest.raises(driver.ImportFailed, match=reason):
            read(memoryview(data))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
