"""`burst serve DEVICE --oip ADDRESS --models FOLDER`, until SIGTERM or SIGINT.

The process is a client of the device, as any other: what a client of the protocol does to it, it does not do to the
device, nor to the device's other clients.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from driver.errors import DeviceFailed, NotPlaced
from driver.gateways.account_process import AccountProcess, GatewayAccount, GatewayKeeper, kept_for, load_all
from driver.gateways.oip.grpc_door import Credentials, DoorLimits, GrpcDoor
from driver.gateways.oip.native_door import VARIABLE as NATIVE
from driver.gateways.oip.native_door import NativeDoor
from driver.gateways.oip.oip_address import OipAddress, oip_address
from driver.gateways.oip.regions import RegionLimits, RegionTable
from driver.gateways.oip.repository import ModelRepository
from driver.gateways.oip.request_spans import RequestSpans
from driver.gateways.oip.resting_repository import RestingRepository
from driver.gateways.oip.served_model import ServedModel
from driver.gateways.oip.service import InferenceService
from driver.gateways.request_memory import MemoryReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from driver.gateways.door_address import DoorAddress
    from driver.gateways.oip.http_door import HttpDoor
    from driver.gateways.oip.model_config import FolderConfig

_REST = 60
"""Looks at the folder without a request, which take a second each."""

_GRACE = 10.0  # seconds for requests that run at the end


class OipOptions(NamedTuple):
    """The options of `burst serve --oip`.

    shared_memory, model_control: at TCP addresses, too. credentials: for all TCP addresses. rest: looks at the folder
    without a request after which models are given back, until the next request; None: they are there from the
    beginning on. also: devices for files that the first one does not run.
    otlp: the address of a collector of OpenTelemetry, which gets a span for each request; "" for none.
    """

    shared_memory: bool = False
    model_control: bool = False
    credentials: Credentials | None = None
    limits: DoorLimits = DoorLimits()
    regions: RegionLimits = RegionLimits()
    rest: int | None = None
    also: Sequence[str] = ()
    otlp: str = ""


class InferenceServer:
    """A folder's models on a device, at some addresses. `begin` serves; `close` ends it; so does `async with`."""

    def __init__(self, device: str, folder: Path, addresses: Sequence[str], options: OipOptions = OipOptions()) -> None:  # noqa: B008 (it is immutable)
        """Bind all addresses. Raise DeviceFailed."""
        if not folder.is_dir():
            raise DeviceFailed(f"--models {folder}: there is no such folder; give one with .onnx and .tflite files")
        self._options, self._tables, self._memory = options, dict[int, RegionTable](), MemoryReturn()
        self.repository = _repository((device, *options.also), folder, options.rest)
        self.doors: list[GrpcDoor | HttpDoor | NativeDoor] = []
        self.addresses: list[str] = []  #: as clients use them
        self._spans = RequestSpans.to(options.otlp) if options.otlp else None
        with ExitStack() as stack:
            if self._spans:
                stack.callback(self._spans.close)
            for text in addresses:
                address = oip_address(text)
                door = address.door
                may, table = self._may_manage(door), self._table(door)
                service = InferenceService(self.repository, table, may_manage=may, spans=self._spans)
                self._open(address, service, stack)
            self._sockets = stack.pop_all()

    def _open(self, address: OipAddress, service: InferenceService, stack: ExitStack) -> None:
        credentials = None if address.door.path else self._options.credentials
        make = _http_door if address.is_http else self._grpc_maker()
        door = make(service, address.door, self._options.limits, credentials)
        self.doors.append(door)
        stack.callback(address.door.remove)
        self.addresses.append(address.with_port(door.port))

    def _grpc_maker(self) -> Any:
        """Return what makes a door for gRPC: that in C++ where the environment names one, but not in the process of an
        account, which may start nothing, and not where requests are traced.
        """
        is_native = bool(os.environ.get(NATIVE)) and self._options.rest is None and not self._spans
        return NativeDoor if is_native else _grpc_door

    def _table(self, address: DoorAddress) -> RegionTable | None:
        """Return the shared memory of the account that the address is for; TCP addresses are for this process's."""
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
        """Serve from now on; models become ready one after the other."""
        for door in self.doors:
            door.begin()
        if self._options.rest is None:
            self.repository.begin()
        self._memory.begin()

    def close(self) -> None:
        """Finish what runs."""
        self._memory.close()
        for door in self.doors:
            door.close(_GRACE)
        self.repository.close()
        for table in self._tables.values():
            table.close()
        self._sockets.close()

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, *reason: object) -> None:
        self.close()


def opened(
    device: str, folder: Path, addresses: Sequence[str], options: OipOptions
) -> tuple[InferenceServer | GatewayKeeper, list[str]]:
    """Return what serves while it is entered, and the addresses as clients use them. Raise DeviceFailed.

    Where root serves sockets of other accounts, that is a process for each account.
    """
    doors = [oip_address(text).door for text in addresses]
    uids = [door.uid if door.path else os.getuid() for door in doors]
    if os.getuid() or not any(uids):
        server = InferenceServer(device, folder, addresses, options)
        return server, server.addresses
    if options.also:
        raise DeviceFailed(
            "--also: each account has a process of its own here, with one device: serve each device apart"
        )
    load_all("driver.gateways.oip.http_door", "numpy.ma")
    folder, options = folder.absolute(), options._replace(rest=_REST)
    texts = {uid: [text for text, its in zip(addresses, uids, strict=True) if its == uid] for uid in uids}
    processes = [
        AccountProcess(
            GatewayAccount.of(uid, device, [folder]),
            device,
            partial(InferenceServer, device, folder, texts[uid], options),
            kept_for(doors),
        )
        for uid in texts
    ]
    keeper = GatewayKeeper(processes, {door.path: door.remove for door in doors if door.path})
    found = {uid: iter(its) for uid, its in zip(texts, keeper.addresses, strict=True)}
    return keeper, [next(found[uid]) for uid in uids]


def _repository(devices: Sequence[str], folder: Path, rest: int | None) -> ModelRepository:
    def load(name: str, version: str, path: Path, config: FolderConfig) -> ServedModel:
        """Load it on the first device that runs it. Raise what the first one says."""
        refusals = list[NotPlaced]()
        for device in devices:
            try:
                return ServedModel(name, version, path, config, device=device)
            except NotPlaced as error:
                refusals.append(error)
        raise refusals[0]

    return ModelRepository(folder, load) if rest is None else RestingRepository(folder, load, rest)


def _grpc_door(
    service: InferenceService, address: DoorAddress, limits: DoorLimits, credentials: Credentials | None
) -> GrpcDoor:
    before = os.umask(0o077)  # gRPC makes the socket; no account may open it before it has its owner
    try:
        if address.path:
            address.prepare_path()
        door = GrpcDoor(service, address.place, limits, credentials)
        if address.path:
            address.refuse_descriptors()
            address.give_path()
    except OSError as error:
        raise DeviceFailed(f"{address.said}: {error}") from error
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
        raise DeviceFailed(f"{address.said}: {error}") from error


__all__ = ["InferenceServer", "OipOptions", "opened"]
