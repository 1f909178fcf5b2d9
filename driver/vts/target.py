"""The device under test, as the kit sees it: a client that checks nothing before it sends.

`driver.connect` validates models on the client's side, too; here they go out as they are, for the device to refuse.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from burst import BurstError, PeerDied, Timeout
from driver.client.device import connect
from driver.client.prepared_model import Home, RemotePreparedModel
from driver.errors import DeviceFailed, DriverError
from driver.protocol.model_codec import encode
from driver.vts.bench import Bench
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.client.device import RemoteDevice
    from driver.nn import Model
    from driver.options import Cache

PATIENCE = 30.0
_MOST_FAILED_STARTS = 3


class Target:
    """One device, connected when it is first needed and again after it was lost."""

    def __init__(self, name: str, patience: float = PATIENCE) -> None:
        """`patience`: seconds after which what was asked of the device counts as hung."""
        self.name, self.patience = name, patience
        self._device: RemoteDevice | None = None
        self._bench: Bench | None = None
        self._failed_starts, self._last_failure = 0, ""

    @property
    def device(self) -> RemoteDevice:
        """A connection that lives. Raises DeviceFailed, at once when several starts have failed."""
        if self._device is None:
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise DeviceFailed(self._last_failure)
            try:
                self._device = connect(self.name)
            except (BurstError, DriverError) as error:
                self._failed_starts += 1
                self._last_failure = str(error)
                raise
            self._failed_starts = 0
        return self._device

    @property
    def bench(self) -> Bench:
        """Memory for executions, kept for the next."""
        if self._bench is None:
            self._bench = Bench()
        return self._bench

    def forget(self) -> None:
        """The connection is of no more use."""
        device, self._device, self._bench = self._device, None, None
        if device is not None:
            with suppress(BurstError, DriverError, FmqError, OSError):
                device.close()

    def supported(self, model: Model) -> list[bool]:
        """What the device says of each operation. Raises InvalidArgument, which is how it refuses a model."""
        count, bits = self._ask("supported", model)
        return [bool(bit) for bit in np.unpackbits(np.frombuffer(bits, np.uint8), count=count)]

    @contextmanager
    def prepared(self, model: Model, cache: Cache | None = None, *more: object) -> Iterator[RemotePreparedModel]:
        """The model on the device, kept in cache files if it can be, and freed afterwards. `more`: what else `prepare`
        takes. Raises StatusError.
        """
        said = self._ask("prepare", model, cache, *more)
        with self._freed(model, Home(self.device.connection, *said)) as prepared:
            yield prepared

    @contextmanager
    def restored(self, model: Model, cache: Cache) -> Iterator[RemotePreparedModel]:
        """What the device makes of cache files that should hold that model, freed afterwards. Raises StatusError."""
        device, (terms, fds) = self.device, _said(cache)
        (number,), _ = device.call("restore", *terms, fds=fds, timeout=self.patience)
        with self._freed(model, Home(device.connection, number)) as prepared:
            yield prepared

    @contextmanager
    def _freed(self, model: Model, home: Home) -> Iterator[RemotePreparedModel]:
        prepared = RemotePreparedModel(self.device, model, home.number)
        prepared.home = home
        try:
            yield prepared
        except (PeerDied, Timeout):
            self.forget()
            raise
        finally:
            if self._device is not None:
                self._device.call("free", home.number, timeout=self.patience)

    def _ask(self, method: str, model: Model, cache: Cache | None = None, *more: object) -> list[Any]:
        device, (terms, fds) = self.device, _said(cache)
        fd, where = encode(model)
        try:
            said = (*(terms or (None, None)), *more) if terms or more else ()
            return device.call(method, where, *said, fds=[fd, *fds], timeout=self.patience)[0]
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


def _said(cache: Cache | None) -> tuple[tuple[object, ...], list[int]]:
    """As calls have it: counts and token, and the descriptors."""
    if cache is None:
        return (), []
    counts = len(cache.model_files), len(cache.data_files)
    return (counts, cache.token), [*cache.model_files, *cache.data_files]
