"""The ZeroMQ socket at which Frigate's detectors ask, each for one frame at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import zmq
import zmq.asyncio

from burst import BurstError
from driver.errors import DriverError
from driver.gateways.frigate.exchange import (
    FrameCall,
    ModelQuestion,
    WrongMessage,
    found,
    model_answer,
    read_header,
    refusal,
)
from driver.gateways.frigate.frame_detector import WrongFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.gateways.frigate.counts import DetectorCounts
    from driver.gateways.frigate.frame_detector import FrameDetector
    from driver.serving import ModelServer

_AT_ONCE = 32  # messages that are answered; further ones wait in their sockets
_LARGEST = 64 << 20  # bytes of a message's part: a frame of a wrong type has to arrive, so that it can be refused
_WAITING = 16  # messages of a connection
_PATIENCE = 8.0  # seconds: after ten, Frigate believes that its detector is stuck
_REMEMBERED = 1024  # connections

_log = logging.getLogger(__name__)


class WrongModel(ValueError):
    """A detector is configured for another model than the one that is served."""


class DetectorDoor:
    """Answers what comes to a ROUTER socket that is bound. Of one event loop."""

    def __init__(
        self, socket: zmq.asyncio.Socket, detector: FrameDetector, server: ModelServer, counts: DetectorCounts
    ) -> None:
        self._socket, self._detector, self._server, self._counts = socket, detector, server, counts
        self._strangers: OrderedDict[bytes, str] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = ""

    async def serve(self) -> None:
        """Until it is cancelled; then finishes what it has begun."""
        try:
            while True:
                await self._turns.acquire()
                parts = await self._socket.recv_multipart(copy=False)
                task = asyncio.create_task(self._serve_one(parts))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_PATIENCE)

    async def _serve_one(self, parts: Sequence[zmq.Frame]) -> None:
        try:
            sender, *rest = parts
            if len(rest) < 2 or len(rest[0]):
                self._note("wrong_message", f"a message of {len(parts) - 1} parts that comes from no REQ socket")
                return  # it has no place for an answer
            answer = await self._answer(sender.bytes, rest[1:])
            await self._socket.send_multipart([sender.bytes, b"", *answer])
        finally:
            self._turns.release()

    async def _answer(self, sender: bytes, parts: Sequence[zmq.Frame]) -> list[bytes]:
        begin = time.monotonic()
        try:
            said = read_header(parts[0].bytes)
            if isinstance(said, ModelQuestion):
                return self._about_model(sender, said)
            rows = await self._look_at(sender, said, parts)
        except WrongMessage as error:
            return self._refused("wrong_message", error)
        except WrongFrame as error:
            return self._refused("wrong_frame", error)
        except WrongModel as error:
            return self._refused("wrong_model", error)
        except (BurstError, DriverError, ValueError, OSError) as error:
            return self._refused("failed", error)
        self._counts.note_answer(time.monotonic() - begin)
        return found(rows)

    def _about_model(self, sender: bytes, question: ModelQuestion) -> list[bytes]:
        self._counts.questions += 1
        mine, trouble = self._detector.path.name, ""
        self._strangers.pop(sender, None)
        if question.name != mine:
            trouble = (
                f"Frigate is configured for the model {question.name!r:.100}, and this is {mine!r}: give Frigate's "
                "model.path the same file name"
            )
            self._strangers[sender] = trouble
            if len(self._strangers) > _REMEMBERED:
                self._strangers.popitem(last=False)
            self._note("wrong_model", trouble)
        elif question.has_file:
            trouble = "this server takes no model files; its model is the one of --model"
            self._note("wrong_model", trouble)
        return model_answer(question, trouble)

    async def _look_at(self, sender: bytes, call: FrameCall, parts: Sequence[zmq.Frame]) -> np.ndarray:
        detector = self._detector
        if sender in self._strangers:
            raise WrongModel(self._strangers[sender])
        if call.model_type and _plain(call.model_type) != _plain(detector.model_type):
            raise WrongModel(
                f"Frigate is configured for the model type {call.model_type!r:.40}, and this model is served as "
                f"{detector.model_type}: set model.model_type to {detector.model_type} in Frigate's configuration"
            )
        if len(parts) != 2:
            raise WrongMessage(f"a message of {len(parts)} parts; a frame has a header and its bytes")
        detector.check(call.shape, call.dtype)
        nbytes = int(np.prod(call.shape)) * detector.dtype.itemsize
        if len(parts[1]) != nbytes:
            raise WrongMessage(f"a frame of {len(parts[1])} bytes; {call.dtype} {list(call.shape)} has {nbytes}")
        frame = np.frombuffer(parts[1].buffer, detector.dtype).reshape(call.shape)
        outputs = await self._server.run(*detector.inputs(frame), timeout=_PATIENCE)
        return detector.rows(outputs, call.shape)

    def _refused(self, outcome: str, error: Exception) -> list[bytes]:
        self._note(outcome, str(error) or type(error).__name__)
        return refusal(str(error) or type(error).__name__)

    def _note(self, outcome: str, words: str) -> None:
        self._counts.frames[outcome] += 1
        if words != self._told:
            self._told = words
            _log.warning("refused: %s", words)


def _plain(model_type: str) -> str:
    """Frigate says "yologeneric" in messages, and "yolo-generic" in configurations."""
    return model_type.replace("-", "")


def limit_socket(socket: zmq.asyncio.Socket) -> None:
    """What one connection may make this process keep."""
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
    socket.setsockopt(zmq.RCVHWM, _WAITING)
    socket.setsockopt(zmq.SNDHWM, _WAITING)
    socket.setsockopt(zmq.LINGER, 1000)
