"""`burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. A device that dies is started again, and has the frame once more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Self

from driver.errors import DeviceFailed
from driver.gateways.door_address import DoorAddress
from driver.gateways.frigate.counts import DetectorCounts
from driver.gateways.frigate.door import DetectorDoor, DoorBounds
from driver.gateways.frigate.frame_detector import FrameDetector
from driver.gateways.metrics_page import MetricsPage
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


def frigate_address(text: str) -> DoorAddress:
    """Parse an address in ZeroMQ's words: * for all. Raise DeviceFailed."""
    said, (scheme, _, rest) = f"--frigate {text}", text.partition("://")
    if scheme == "ipc":
        return DoorAddress.of_path(said, rest, os.getuid())
    if rest.startswith("*:"):
        rest = "0.0.0.0" + rest[1:]  # noqa: S104 (asked for)
    door = DoorAddress.of_tcp(said, rest.removesuffix("*") + "0" * rest.endswith(":*")) if scheme == "tcp" else None
    if not door:
        raise DeviceFailed(f"{said}: give ipc:///PATH, tcp://HOST:PORT, or tcp://:PORT for this machine alone")
    return door


class DetectorServer:
    """One model at one address, in one event loop: `async with` it."""

    def __init__(
        self,
        device: str,
        model: Path,
        model_type: str,
        address: str,
        metrics: str | None = None,
        bounds: DoorBounds = DoorBounds(),  # noqa: B008 (it is immutable)
    ) -> None:
        """Read the model, and bind the addresses. Raise what `driver.load` raises, and DeviceFailed."""
        self._device, self._bounds = device, bounds
        self._detector, self.counts = FrameDetector(model, model_type), DetectorCounts(model.name)
        with ExitStack() as stack:
            door = frigate_address(address)
            self._listener = stack.enter_context(door.listen())
            self._listener.setblocking(False)
            stack.callback(door.remove)
            if not door.path:
                door = door._replace(port=self._listener.getsockname()[1])
            self.door = door
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
            self.metrics.begin(lambda: self.counts, lambda: "")
            door = DetectorDoor(self._detector, server, self.counts, self._bounds)
            task = asyncio.create_task(door.serve(self._listener))
            stack.push_async_callback(_end, task)
            self._stack = stack.pop_all()
        if self.door.is_open:
            _log.warning("%s: every machine that reaches this address may use the model", self.door.said)
        return self

    @property
    def address(self) -> str:
        """The address as clients use it."""
        return f"ipc://{self.door.path}" if self.door.path else f"tcp://{self.door.place}"

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


__all__ = ["DetectorServer", "frigate_address"]
