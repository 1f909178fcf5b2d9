"""Connections to the cells of a device: the services that `burst serve --group` gives to one account each.

Only root and the device's own account get them. The cells do not count them among their clients.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from burst import PeerDied, StatusError, Timeout
from burst.channel import Channel, close_all
from driver.client.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator


_LEAST = 0.05  # seconds that each answer may take


class ConnectedCell(NamedTuple):
    """A cell that this process is connected to."""

    uid: int | None  #: the account that it serves; None: this is no cell, and serves all that we may see
    connection: Connection


class Cells(NamedTuple):
    """The cells of a device."""

    connected: list[ConnectedCell]
    counts: int | None  #: a descriptor of the `CensusCounts` of the cells; None: the device has none


@contextmanager
def cells_of(connection: Connection, within: float) -> Iterator[Cells]:
    """Yield the cells behind a connection; that alone if there are none, or none that we may see. Closed on leaving.

    `within`: seconds for all of them to answer. A cell that has ended, or does not answer by then, is left out.

    Raise StatusError, PeerDied, Timeout.
    """
    end, fds, uids = time.monotonic() + within, list[int](), list[int]()
    found, counts = list[ConnectedCell](), None
    try:
        while True:
            (total, *rows), page = connection.call("cells", len(uids), timeout=_left(end))
            if not total:
                found.append(ConnectedCell(None, connection))
                break
            counts, fds[len(fds) :] = _kept(counts, page.pop()), page
            uids += rows
            if not rows or len(uids) >= total:
                break
        found += _greeted(uids, fds, end)
        yield Cells(found, counts)
    finally:
        for cell in found:
            if cell.connection is not connection:
                cell.connection.close()
        close_all(fds)
        close_all([] if counts is None else [counts])


def _kept(before: int | None, fd: int) -> int:
    close_all([] if before is None else [before])
    return fd


def _greeted(uids: list[int], fds: list[int], end: float) -> Iterator[ConnectedCell]:
    """Yield the cells that answer. Takes the descriptors out of `fds`."""
    for uid in uids:
        channel = Channel.from_fd(fds.pop(0))
        try:
            yield ConnectedCell(uid, Connection(channel, timeout=_left(end)))
        except (PeerDied, StatusError, Timeout):
            channel.close()


def _left(end: float) -> float:
    return max(_LEAST, end - time.monotonic())
