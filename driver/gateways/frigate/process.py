"""`burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. A device that dies is started again, and has the frame once more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from driver.errors import DeviceFailed
from driver.gateways.frigate.counts import DetectorCounts
from driver.gateways.frigate.door import DetectorDoor, limit_socket
from driver.gateways.frigate.frame_detector import FrameDetector
from driver.gateways.oip.address import DoorAddress
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LONGEST_PATH = 107
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[0-9.]+|\*|localhost):(\d{1,5}|\*)")
_ENDS = (signal.SIGTERM, signal.SIGINT)


class IpcAddress(DoorAddress):
    """A Unix socket, as ZeroMQ spells it."""

    __slots__ = ()

    @property
    def said(self) -> str:
        return f"--frigate ipc://{self.path}"


def serve_detector(
    device: str,
    model: Path,
    model_type: str,
    address: str,
    metrics: str | None,
    tell: Callable[[str, str | None], object],
) -> None:
    """Serves until SIGTERM or SIGINT. `tell`: called with the addresses when clients may connect.

    Raises DriverError and BurstError.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    detector, counts = FrameDetector(model, model_type), DetectorCounts(model.name)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        socket = stack.enter_context(context.socket(zmq.ROUTER))
        limit_socket(socket)
        bound = _bind(socket, address, stack)
        page = None
        if metrics:
            from driver.service.metrics_server import listen, serve_metrics, where

            listener = listen(metrics)
            page = where(listener)
            serve_metrics(counts, lambda: "", listener.detach())
        asyncio.run(_serve(device, detector, socket, counts, lambda: tell(bound, page)))


async def _serve(
    device: str,
    detector: FrameDetector,
    socket: zmq.asyncio.Socket,
    counts: DetectorCounts,
    tell: Callable[[], object],
) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in _ENDS:
        loop.add_signal_handler(number, end.set)
    compiled = await asyncio.to_thread(compile_model, detector.model, device=device, progress=False)
    with compiled:
        async with compiled.serve(shapes=detector.shapes, name=detector.path.name) as server:
            outputs = await server.run(*detector.blank())
            detector.approve(outputs)
            serving = asyncio.create_task(DetectorDoor(socket, detector, server, counts).serve())
            tell()
            ending = asyncio.create_task(end.wait())
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def _bind(socket: zmq.asyncio.Socket, address: str, stack: ExitStack) -> str:
    """The address as clients use it. ZeroMQ itself would take a socket's path away from the server that has it."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_PATH:
            raise DeviceFailed(
                f"--frigate {address}: the path of a socket is absolute and has at most {_LONGEST_PATH} bytes"
            )
        listener = IpcAddress(is_http=False, path=path, uid=os.getuid()).listen()
        stack.callback(_remove, path)
        socket.setsockopt(zmq.USE_FD, listener.detach())  # ZeroMQ closes it
        socket.bind(address)
        return address
    if not _TCP.fullmatch(address):
        raise DeviceFailed(f"--frigate {address}: give ipc:///PATH, or tcp://HOST:PORT such as tcp://127.0.0.1:5555")
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise DeviceFailed(f"--frigate {address}: cannot listen there ({error}); use another address") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _remove(path: str) -> None:
    """ZeroMQ may have removed it."""
    if os.path.lexists(path):
        os.unlink(path)


__all__ = ["serve_detector"]
