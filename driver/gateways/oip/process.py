"""`burst serve DEVICE --oip ADDRESS --models FOLDER`, until SIGTERM or SIGINT.

The process is a client of the device, as any other: what a client of the protocol does to it, it does not do to the
device, nor to the device's other clients.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from driver.errors import DeviceFailed
from driver.gateways.oip.address import DoorAddress, door_address
from driver.gateways.oip.grpc_door import Credentials, DoorLimits, GrpcDoor
from driver.gateways.oip.regions import RegionLimits, RegionTable
from driver.gateways.oip.repository import ModelRepository
from driver.gateways.oip.served_model import ServedModel
from driver.gateways.oip.service import InferenceService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType

    from driver.gateways.oip.http_door import HttpDoor

_GRACE = 10.0  # seconds for requests that run at the end
_ENDS = (signal.SIGTERM, signal.SIGINT)


class OipOptions(NamedTuple):
    """What `burst serve --oip` may be told.

    shared_memory, model_control: at TCP addresses, too. credentials: for all TCP addresses.
    """

    shared_memory: bool = False
    model_control: bool = False
    credentials: Credentials | None = None
    limits: DoorLimits = DoorLimits()
    regions: RegionLimits = RegionLimits()


class InferenceServer:
    """A folder's models on a device, at some addresses. `begin` serves; `close` ends it."""

    def __init__(self, device: str, folder: Path, addresses: Sequence[str], options: OipOptions = OipOptions()) -> None:  # noqa: B008 (it is immutable)
        """Binds all addresses. Raises DeviceFailed."""
        if not folder.is_dir():
            raise DeviceFailed(f"--models {folder}: there is no such folder; give one with .onnx and .tflite files")
        self._options, self._tables = options, dict[int, RegionTable]()
        self.repository = ModelRepository(
            folder, lambda name, version, path, config: ServedModel(name, version, path, config, device)
        )
        self._doors: list[GrpcDoor | HttpDoor] = []
        self.addresses: list[str] = []  #: as clients use them
        with ExitStack() as stack:
            for text in addresses:
                address = door_address(text)
                service = InferenceService(self.repository, self._table(address), may_manage=self._may_manage(address))
                self._open(address, service, stack)
            self._sockets = stack.pop_all()

    def _open(self, address: DoorAddress, service: InferenceService, stack: ExitStack) -> None:
        credentials = None if address.path else self._options.credentials
        port = 0
        if address.is_http:
            http_door = _http_door(service, address, self._options.limits, credentials)
            self._doors.append(http_door)
            port = http_door.port
        else:
            grpc_door = _grpc_door(service, address, self._options.limits, credentials)
            self._doors.append(grpc_door)
            port = grpc_door.port
        if address.path:
            stack.callback(_remove, address.path)
        self.addresses.append(address.with_port(port))

    def _table(self, address: DoorAddress) -> RegionTable | None:
        """The shared memory of the account for which the address is; all TCP addresses are for this process's."""
        if not address.path and not self._options.shared_memory:
            return None
        uid = address.uid if address.path else os.getuid()
        key = uid if address.path else -1
        if key not in self._tables:
            self._tables[key] = RegionTable(uid, self._options.regions)
        return self._tables[key]

    def _may_manage(self, address: DoorAddress) -> bool:
        return self._options.model_control or (bool(address.path) and address.uid == os.getuid())

    def begin(self) -> None:
        """Serves from now on; models become ready one after the other."""
        for door in self._doors:
            door.begin()
        self.repository.begin()

    def close(self) -> None:
        """Finishes what runs."""
        for door in self._doors:
            door.close(_GRACE)
        self.repository.close()
        for table in self._tables.values():
            table.close()
        self._sockets.close()


def serve_inference(
    device: str,
    folder: Path,
    addresses: Sequence[str],
    options: OipOptions,
    tell: Callable[[InferenceServer], object],
) -> None:
    """Serves until SIGTERM or SIGINT. `tell`: called when clients may connect. Raises DeviceFailed."""
    end = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        end.set()

    for number in _ENDS:
        signal.signal(number, stop)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = InferenceServer(device, folder, addresses, options)
    try:
        server.begin()
        tell(server)
        end.wait()
    finally:
        server.close()


def _grpc_door(
    service: InferenceService, address: DoorAddress, limits: DoorLimits, credentials: Credentials | None
) -> GrpcDoor:
    before = os.umask(0o077)  # gRPC makes the socket; no account may open it before it has its owner
    try:
        if address.path:
            address.prepare_path()
        door = GrpcDoor(service, address.for_grpc, limits, credentials)
        if address.path:
            address.give_path()
    except OSError as error:
        raise DeviceFailed(f"--oip {address.with_port(0)}: {error}") from error
    finally:
        os.umask(before)
    return door


def _http_door(
    service: InferenceService, address: DoorAddress, limits: DoorLimits, credentials: Credentials | None
) -> HttpDoor:
    from driver.gateways.oip.http_door import HttpDoor

    try:
        return HttpDoor(service, address.listen(), limits, credentials)
    except OSError as error:
        raise DeviceFailed(f"--oip {address.with_port(0)}: {error}") from error


def _remove(path: str) -> None:
    """gRPC may have removed it."""
    if os.path.exists(path):
        os.unlink(path)


__all__ = ["InferenceServer", "OipOptions", "serve_inference"]
