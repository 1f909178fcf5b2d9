"""Connections to a device of this account or to one that is served, each a new one, greeted."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from burst import PeerDied, Timeout
from driver.client import discovery, served_sockets
from driver.client.connection import Connection
from driver.devices.library.description import is_library
from driver.errors import DeviceFailed, DeviceNotFound

if TYPE_CHECKING:
    from burst.channel import Channel

ATTEMPTS = 3
"""A service may retire just as we connect; twice as many for a device that was killed and may be killed again."""

_AGAIN = 0.05  # seconds
_SHUTDOWN_GRACE = 1.0  # seconds in which a service tells what a driver in a library did to its engine


class ClientTerms(NamedTuple):
    """The terms on which a client connects to each life of its device."""

    application: str | None = None  #: the name that was declared, or None
    real_time: bool = False  #: its bursts are served in real time


USUAL_TERMS = ClientTerms()


def to_own(name: str, terms: ClientTerms, attempts: int = ATTEMPTS) -> Connection:
    """Return a connection to a device of this account. Raise as `driver.connect`."""
    for _ in range(attempts):
        with suppress(PeerDied):
            found = greeted(name, discovery.reach(name), terms)
            found.shutdown_grace = _SHUTDOWN_GRACE if is_library(name) else found.shutdown_grace
            return found
    log = discovery.end_of_log(name)
    raise DeviceFailed(f"device {name!r} ended while it started; {log}")


def to_served(address: str, terms: ClientTerms) -> Connection:
    """Return a connection to a device that is served at that path. Raise as `driver.connect`."""
    for _ in range(ATTEMPTS - 1):  # an account's engine that ends is followed by another one
        with suppress(PeerDied):
            return greeted(address, discovery.reach(address), terms)
    try:
        return greeted(address, discovery.reach(address), terms)
    except PeerDied as error:
        raise DeviceFailed(f"{address}: it ended, or does not serve uid {os.getuid()}; its log says more") from error


def to_served_again(address: str, terms: ClientTerms, patience: float) -> Connection:
    """Wait for a served device: its owner starts it again, not this process. Raise DeviceFailed."""
    end = time.monotonic() + patience
    while True:
        try:
            return to_served(address, terms)
        except (DeviceNotFound, DeviceFailed) as error:
            if time.monotonic() > end:
                raise DeviceFailed(f"the device did not come back within {patience:g} s: {error}") from error
        time.sleep(_AGAIN)


def to_any(address: str, terms: ClientTerms) -> Connection:
    """Return a connection to a device of either kind. Raise as `driver.connect`."""
    return (to_served if served_sockets.is_path(address) else to_own)(address, terms)


def greeted(name: str, channel: Channel, terms: ClientTerms) -> Connection:
    """Return a connection over a channel, which is closed where there is none. Raise as `driver.connect`."""
    try:
        connection = Connection(channel, terms.application)
        if terms.real_time:
            connection.call("real_time")
    except BaseException as error:
        channel.close()
        if isinstance(error, DeviceFailed | Timeout):
            raise DeviceFailed(f"device {name!r}: {error}") from error
        raise
    return connection
