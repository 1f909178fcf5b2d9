"""`burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. A device that dies is started again, and has the frame once more.
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Self

import zmq
import zmq.asyncio

from driver.errors import DeviceFailed
from driver.gateways.door_address import DoorAddress
from driver.gateways.foreground import MetricsPage
from driver.gateways.frigate.counts import DetectorCounts
from driver.gateways.frigate.door import DetectorDoor, limit_socket
from driver.gateways.frigate.frame_detector import FrameDetector
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from pathlib import Path

    from driver.serving import ModelServer

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[0-9.]+|\*|localhost):(\d{1,5}|\*)")


class DetectorServer:
    """One model at one address, in one event loop: `async with` it."""

    def __init__(self, device: str, model: Path, model_type: str, address: str, metrics: str | None = None) -> None:
        """Reads the model, and binds the addresses. Raises what `driver.load` raises, and DeviceFailed."""
        self._device = device
        self._detector, self._counts = FrameDetector(model, model_type), DetectorCounts(model.name)
        with ExitStack() as stack:
            context = stack.enter_context(zmq.asyncio.Context())
            self._socket = stack.enter_context(context.socket(zmq.ROUTER))
            limit_socket(self._socket)
            self.address = _bind(self._socket, address, stack)  #: as clients use it
            self.metrics = MetricsPage(metrics)
            stack.callback(self.metrics.close)
            self._bound = stack.pop_all()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._bound)
            model = self._detector.model
            compiled = await asyncio.to_thread(compile_model, model, device=self._device, progress=False)
            stack.enter_context(compiled)
            serving = compiled.serve(shapes=self._detector.shapes, name=self._detector.path.name)
            server = await stack.enter_async_context(serving)
            self._detector.approve(await server.run(*self._detector.blank()))
            self.metrics.begin(lambda: self._counts, lambda: "")
            task = asyncio.create_task(self._open(server).serve())
            stack.push_async_callback(_end, task)
            self._stack = stack.pop_all()
        return self

    def _open(self, server: ModelServer) -> DetectorDoor:
        return DetectorDoor(self._socket, self._detector, server, self._counts)

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _bind(socket: zmq.asyncio.Socket, address: str, stack: ExitStack) -> str:
    """The address as clients use it. ZeroMQ itself would take a socket's path away from the server that has it."""
    said = f"--frigate {address}"
    if address.startswith("ipc://"):
        door = DoorAddress.of_path(said, address.removeprefix("ipc://"), os.getuid())
        listener = door.listen()
        stack.callback(door.remove)
        socket.setsockopt(zmq.USE_FD, listener.detach())  # ZeroMQ closes it
        socket.bind(address)
        return address
    if not _TCP.fullmatch(address):
        raise DeviceFailed(f"{said}: give ipc:///PATH, or tcp://HOST:PORT such as tcp://127.0.0.1:5555")
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise DeviceFailed(f"{said}: cannot listen there ({error}); use another address") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


__all__ = ["DetectorServer"]
