"""The device under test: a client that sends without checking.

`driver.connect` validates models on the client's side; this client does not, so that the device must refuse them.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from burst import BurstError, PeerDied, Timeout
from driver.client.device import connect
from driver.client.prepared_model import RemotePreparedModel
from driver.client.remote_executor import Home, RemoteExecutor
from driver.errors import DeviceFailed, DriverError
from driver.protocol.model_codec import encode
from driver.vts.bench import Bench
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.client.device import RemoteDevice
    from driver.nn import Model
    from driver.options import Cache
    from driver.vts.sanitizers import Sanitizers

PATIENCE = 30.0
_MOST_FAILED_STARTS = 3
_NAP = 0.02


def answering(name: str, patience: float = PATIENCE, tries: int = _MOST_FAILED_STARTS) -> RemoteDevice:
    """Connect to a device whose engine answers: one that a test has killed may take a connection before it ends.

    Raise DeviceFailed, and whatever else `connect` raises; PeerDied if devices die as soon as they start.
    """
    for left in reversed(range(tries)):
        device = connect(name)
        try:
            device.call("status", timeout=patience)
            break
        except PeerDied:
            device.close()
            if not left:
                raise
        except BaseException:
            device.close()
            raise
    return device


class Target:
    """One device: connects on first use, and again after the connection was lost."""

    def __init__(self, name: str, patience: float = PATIENCE, sanitizers: Sanitizers | None = None) -> None:
        """patience: seconds after which the device counts as hung. sanitizers: that the device was built with."""
        self.name, self.patience, self._sanitizers = name, patience, sanitizers
        self._device: RemoteDevice | None = None
        self._bench: Bench | None = None
        self._failed_starts, self._last_failure = 0, ""

    @property
    def device(self) -> RemoteDevice:
        """A live connection. Raises DeviceFailed; without a further try after several failed starts."""
        if self._device is None:
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise DeviceFailed(self._last_failure)
            try:
                self._device = answering(self.name, self.patience)
            except (BurstError, DriverError) as error:
                self._failed_starts += 1
                self._last_failure = str(error)
                raise
            self._failed_starts = 0
        return self._device

    @property
    def bench(self) -> Bench:
        """Memory for executions, reused by the next one."""
        if self._bench is None:
            self._bench = Bench()
        return self._bench

    def forget(self) -> None:
        """Drop the connection."""
        device, self._device, self._bench = self._device, None, None
        if device is not None:
            with suppress(BurstError, DriverError, FmqError, OSError):
                device.close()

    def settle(self) -> None:
        """Wait until runs that were given up have ended, or the engine has ended over them, as it may: the next test
        is not to pay for them. Raise Timeout.
        """
        end = time.monotonic() + self.patience
        try:
            while self.device.traces():  # of bursts, each of which ends with its run
                if time.monotonic() > end:
                    raise Timeout(f"a burst that was closed has not ended within {self.patience:g} s")
                time.sleep(_NAP)
        except PeerDied:
            self.forget()

    def reports(self) -> str:
        """Return what sanitizers have reported since the last call; "" for nothing."""
        return self._sanitizers.reports() if self._sanitizers else ""

    def supported(self, model: Model) -> list[bool]:
        """Return the device's answer for each operation. Raise InvalidArgument when it refuses the model."""
        count, bits = self._ask("supported", model)
        return [bool(bit) for bit in np.unpackbits(np.frombuffer(bits, np.uint8), count=count)]

    @contextmanager
    def prepared(self, model: Model, cache: Cache | None = None, *more: object) -> Iterator[RemotePreparedModel]:
        """Prepare a model, in cache files if given, and free it afterwards. more: further arguments of `prepare`.

        Raise StatusError.
        """
        said = self._ask("prepare", model, cache, *more)
        with self._freed(model, Home(self.device.connection, *said)) as prepared:
            yield prepared

    @contextmanager
    def restored(self, model: Model, cache: Cache) -> Iterator[RemotePreparedModel]:
        """Restore a model from cache files, and free it afterwards. Raise StatusError."""
        device, (terms, fds) = self.device, _call_arguments(cache)
        (number, *_), _ = device.call("restore", *terms, fds=fds, timeout=self.patience)
        with self._freed(model, Home(device.connection, number)) as prepared:
            yield prepared

    @contextmanager
    def _freed(self, model: Model, home: Home) -> Iterator[RemotePreparedModel]:
        prepared = RemotePreparedModel(RemoteExecutor(self.device, model, home))
        try:
            yield prepared
        except (PeerDied, Timeout):
            self.forget()
            raise
        finally:
            if self._device is not None:
                self._device.call("free", home.number, timeout=self.patience)

    def _ask(self, method: str, model: Model, cache: Cache | None = None, *more: object) -> list[Any]:
        device, (terms, fds) = self.device, _call_arguments(cache)
        encoded = encode(model)
        said = (*(terms or (None, None)), *more) if terms or more else ()
        return device.call(method, encoded.where, *said, fds=[*encoded.fds, *fds], timeout=self.patience)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


def _call_arguments(cache: Cache | None) -> tuple[tuple[object, ...], list[int]]:
    """Return the cache as call arguments: counts and token, and the descriptors."""
    if cache is None:
        return (), []
    counts = len(cache.model_files), len(cache.data_files)
    return (counts, cache.token), [*cache.model_files, *cache.data_files]
