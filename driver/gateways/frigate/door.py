"""The socket at which Frigate's detectors ask, each for one frame at a time.

A connection has one message read and answered at a time, in memory of the size of the model's frame; what does not
belong there is skipped as it comes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import BurstError
from driver.errors import DriverError
from driver.gateways.frigate.exchange import (
    LONGEST_HEADER,
    ModelQuestion,
    WrongMessage,
    found,
    model_answer,
    read_header,
    refusal,
)
from driver.gateways.frigate.frame_detector import WrongFrame
from driver.gateways.frigate.peer_name import peer_name
from driver.gateways.frigate.zmtp import BrokenConnection, ZmtpConnection
from driver.service.http_connections import account_of
from driver.service.peer_limiter import PeerLimiter

if TYPE_CHECKING:
    import socket

    from numpy.typing import NDArray

    from driver.gateways.frigate.counts import DetectorCounts
    from driver.gateways.frigate.exchange import FrameCall
    from driver.gateways.frigate.frame_detector import FrameDetector
    from driver.replicas import ModelServer
    from driver.service.peer_limiter import PeerVisit

_PATIENCE = 8.0  # seconds: after ten, Frigate believes that its detector is stuck
_MOST_ENVELOPE, _LONGEST_LABEL = 2, 255
_LARGEST_FRAME = 64 << 20
_MOST_LINES = 100  # in the log, of one detector
_SPARE = 2  # frames whose memory is kept for the next ones
_NONE = np.empty(0, np.uint8)

_log = logging.getLogger(__name__)


class WrongModel(ValueError):
    """A detector is configured for another model than the one that is served."""


_OUTCOMES: dict[type, str] = {WrongMessage: "wrong_message", WrongFrame: "wrong_frame", WrongModel: "wrong_model"}


class DoorBounds(NamedTuple):
    """connections: of one account or machine at a time, and half as many again of all. Seconds: complete, for a message
    that has begun, a greeting, and for taking an answer; idle, after which a connection may have to make room for a new
    one, in a sixth of that for one of a machine that has fewer.
    """

    connections: int = 64
    complete: float = 10.0
    idle: float = 60.0


class DetectorDoor:
    """Answers what comes to a listening socket, in one event loop."""

    def __init__(
        self,
        detector: FrameDetector,
        server: ModelServer,
        counts: DetectorCounts,
        bounds: DoorBounds = DoorBounds(),  # noqa: B008 (it is immutable)
    ) -> None:
        self.detector, self.server, self.counts, self.bounds = detector, server, counts, bounds
        self._connections: dict[asyncio.Task[None], DetectorConnection] = {}
        self._limiter = PeerLimiter.of_one(bounds.connections)
        self._told, self._lines = "", Counter[str]()
        self._spare: list[NDArray[np.uint8]] = []

    async def serve(self, listener: socket.socket) -> None:
        """Serve until it is cancelled; then finish what it has begun. `listener` does not block."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self.tell("all", f"a connection is not accepted: {error}")
                    await asyncio.sleep(0.1)
                    continue
                self._admit(peer)
        finally:
            await self._end()

    def lend(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory for a frame."""
        while self._spare:
            if (spare := self._spare.pop()).nbytes == nbytes:
                return spare
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # so that what is not kept is the system's again

    def take_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep the memory of a frame that nothing reads any more."""
        if memory.nbytes and len(self._spare) < _SPARE:
            self._spare.append(memory)

    def _admit(self, peer: socket.socket) -> None:
        name = self.counts.known(peer_name(peer))
        visit = self._limiter.enter(account_of(peer), peer.close)
        if visit is None:
            self.counts.refused += 1
            self.tell(name, f"{self.bounds.connections} connections are open, and all of them are in use")
            peer.close()
            return
        visit.wait(math.inf, yields_in=self.bounds.complete)
        connection = DetectorConnection(self, peer, name, visit)
        task = asyncio.create_task(connection.run())
        visit.end, visit.asks = task.cancel, connection.zmtp.has_begun
        self._connections[task] = connection
        task.add_done_callback(self._forget)
        self.counts.connected = len(self._connections)

    def _forget(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        connection.close()
        self._limiter.leave(connection.visit)
        self.counts.connected = len(self._connections)

    async def _end(self) -> None:
        tasks = dict(self._connections)
        for task, connection in tasks.items():
            if connection.is_silent:
                task.cancel()
            else:
                connection.is_last = True
        if tasks:
            await asyncio.wait(tasks, timeout=_PATIENCE)

    def tell(self, name: str, words: str) -> None:
        """Log a refusal once, however often it happens in a row; /metrics counts all."""
        if words == self._told or self._lines[name] > _MOST_LINES:
            return
        self._told = words
        self._lines[name] += 1
        more = "; no more is told of this detector" if self._lines[name] > _MOST_LINES else ""
        _log.warning("refused: %s: %s%s", name, words, more)


class DetectorConnection:
    """One detector's connection, from its greeting to its end."""

    def __init__(self, door: DetectorDoor, peer: socket.socket, name: str, visit: PeerVisit) -> None:
        peer.setblocking(False)
        self._door, self._socket, self._name = door, peer, name
        self.zmtp = ZmtpConnection(peer)
        self._frame = _NONE
        self._stranger = ""  # why this detector gets no boxes of this model
        self.visit = visit
        self.is_silent = False  #: it is between two messages
        self.is_last = False  #: ends after the message that is being answered

    async def run(self) -> None:
        """Answer frames until the detector leaves, or does what no detector does."""
        complete, idle = self._door.bounds.complete, self._door.bounds.idle
        try:
            async with asyncio.timeout(complete):
                await self.zmtp.greet()
            while not self.is_last:
                self.is_silent = True
                self.visit.wait(math.inf, yields_in=idle, to_others_in=idle / 6)
                size = await self.zmtp.begin_message(complete)
                begin, self.is_silent = time.monotonic(), False
                self.visit.work()
                async with asyncio.timeout(complete):
                    envelope, said = await self._message(size)
                answer = await self._answer(said, begin)
                if envelope:
                    async with asyncio.timeout(complete):
                        await self.zmtp.send([*envelope, *answer])
        except BrokenConnection as error:
            if error.is_wrong:
                self._door.tell(self._name, str(error))
        except TimeoutError:
            self._door.tell(self._name, "it stopped in the middle of a message, or does not read its answer")

    def close(self) -> None:
        """Close its socket."""
        self._socket.close()

    # ---- a message

    async def _message(self, size: int) -> tuple[list[bytes], FrameCall | ModelQuestion | ValueError]:
        """Return the envelope of the answer, and the question or what is wrong with it. `size`: of the first part.

        All of the message has been read then, or skipped. Where there is no place for an answer, nothing begins it.
        """
        envelope = list[bytes]()
        said: FrameCall | ModelQuestion | ValueError
        try:
            envelope = await self._envelope(size)
            said = await self._header()
            if not isinstance(said, ModelQuestion):
                await self._take_frame(said)
        except (WrongMessage, WrongFrame, WrongModel) as error:
            said = error
        await self.zmtp.skip_message()
        return envelope, said

    async def _envelope(self, size: int) -> list[bytes]:
        """Return the parts up to the empty one, which an answer has to begin with. Raise WrongMessage."""
        envelope = list[bytes]()
        while True:
            if size > _LONGEST_LABEL or len(envelope) == _MOST_ENVELOPE or not self.zmtp.has_more:
                raise WrongMessage("the message does not come from a REQ socket")
            envelope.append(await self.zmtp.read())
            if not size:
                return envelope
            size = await self.zmtp.begin_part()

    async def _header(self) -> FrameCall | ModelQuestion:
        size = await self.zmtp.begin_part()
        if size > LONGEST_HEADER:
            raise WrongMessage(f"a header of {size} bytes; {LONGEST_HEADER} at most")
        return read_header(await self.zmtp.read())

    async def _take_frame(self, call: FrameCall) -> None:
        """Read the frame into the buffer. Raise WrongMessage, WrongFrame and WrongModel."""
        detector = self._door.detector
        if self._stranger:
            raise WrongModel(self._stranger)
        if call.model_type and _plain(call.model_type) != _plain(detector.model_type):
            raise WrongModel(
                f"Frigate is configured for the model type {call.model_type!r:.40}, and this model is served as "
                f"{detector.model_type}: set model.model_type to {detector.model_type} in Frigate's configuration"
            )
        detector.check(call.shape, call.dtype)
        nbytes = math.prod(call.shape) * detector.dtype.itemsize
        if nbytes > _LARGEST_FRAME:
            raise WrongFrame(f"a frame of shape {list(call.shape)}: {_LARGEST_FRAME >> 20} MiB at most")
        if not self.zmtp.has_more:
            raise WrongMessage("a frame's header without its bytes")
        if (came := await self.zmtp.begin_part()) != nbytes:
            raise WrongMessage(f"a frame of {came} bytes; {call.dtype} {list(call.shape)} has {nbytes}")
        self._frame = self._door.lend(nbytes)
        await self.zmtp.read_into(self._frame.data)
        if self.zmtp.has_more:
            raise WrongMessage("a message of more parts than a frame's header and its bytes")

    # ---- its answer

    async def _answer(self, said: FrameCall | ModelQuestion | ValueError, begin: float) -> list[bytes]:
        if isinstance(said, ModelQuestion):
            return self._about_model(said)
        try:
            if isinstance(said, ValueError):
                raise said
            rows = await self._look_at(said)
        except (BurstError, DriverError, ValueError, OSError) as error:
            self._frame = _NONE  # a request that was given up may still be read
            words = str(error) or type(error).__name__
            self._note(_OUTCOMES.get(type(error), "failed"), words)
            return refusal(words)
        self._door.take_back(self._frame)
        self._frame = _NONE
        self._door.counts.note_answer(self._name, time.monotonic() - begin)
        return found(rows)

    def _about_model(self, question: ModelQuestion) -> list[bytes]:
        self._door.counts.questions[self._name] += 1
        mine, trouble = self._door.detector.path.name, ""
        self._stranger = ""
        if question.name != mine:
            trouble = self._stranger = (
                f"Frigate is configured for the model {question.name!r:.100}, and this is {mine!r}: give Frigate's "
                "model.path the same file name"
            )
        elif question.has_file:
            trouble = "this server takes no model files; its model is the one of --model"
        if trouble:
            self._note("wrong_model", trouble)
        return model_answer(question, trouble)

    async def _look_at(self, call: FrameCall) -> np.ndarray[Any, Any]:
        detector = self._door.detector
        frame = self._frame.view(detector.dtype).reshape(call.shape)
        outputs = await self._door.server.run(*detector.inputs(frame), timeout=_PATIENCE)
        return detector.rows(outputs, call.shape)

    def _note(self, outcome: str, words: str) -> None:
        self._door.counts.frames[self._name, outcome] += 1
        self._door.tell(self._name, words)


def _plain(model_type: str) -> str:
    """Frigate says "yologeneric" in messages, and "yolo-generic" in configurations."""
    return model_type.replace("-", "")
