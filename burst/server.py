"""The device's side of a burst: a listener thread that takes requests, runs them and answers.

Two ways to make one. `BurstServer(…, bind)` is for a device that can bind a request to memory once and run it many
times. `BurstServer.from_prepared_model(…, execute)` is for one that only has a synchronous execution.

The listener is tied to its client: it ends when the client closes its context, breaks the protocol, or dies.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from burst.channel import MAX_FDS, Channel, Message, close_all
from burst.errors import GeneralFailure, InvalidArgument, Malformed, PeerDied, Timeout
from burst.executor import CachedExecutor, Execution, Job, Protocols
from burst.memory import Memory
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, Request, Result, Timing
from burst.wire import DATUM, DATUM_DTYPE, decode_request, encode_result
from fmq import Exchange, Flavour, FmqError, InvalidDescriptor, MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fmq import Descriptor

_log = logging.getLogger(__name__)
_CALLBACK_TIMEOUT = 10.0  # seconds that a client has to hand over its memory
_MAX_LENGTH = 2**16  # elements of a queue: what a client can make us allocate for a packet
FAILURE_PACKET = encode_result(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)


def _nothing() -> None: ...


class BurstServer:
    """One burst. `start` begins listening; `stop` ends it from any thread and does not wait for a running execution."""

    def __init__(
        self,
        requests: Descriptor,
        results: Descriptor,
        callback: Channel,
        bind: Callable[[Request], Execution],
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        """Attaches the client's queues. `bind` gets requests whose pools are `Memory`, mapped once per slot.

        Raises InvalidDescriptor, RoleTaken. `on_end` runs in the listener when it has freed all.
        """
        self._callback, self.on_end = callback, on_end
        for queue_of in (requests, results):
            is_channel = queue_of.dtype == DATUM_DTYPE and queue_of.flavour is Flavour.SYNCHRONIZED
            if not is_channel or queue_of.capacity > _MAX_LENGTH:
                raise InvalidDescriptor(
                    f"a burst's queues are synchronized, of up to {_MAX_LENGTH} elements of {DATUM} bytes; "
                    f"not {queue_of.flavour.name.lower()}, {queue_of.capacity} x {queue_of.dtype}"
                )
        with MessageQueue.open(requests) as queue:
            self._reader = queue.reader()
        try:
            with MessageQueue.open(results) as queue:
                self._writer = queue.writer()
        except BaseException:
            self._reader.close()
            raise
        self._exchange = Exchange(self._writer, self._reader).__call__
        self._executor = CachedExecutor(Protocols(lambda raw: Job(decode_request(raw), bind), _encode, self._fetch))
        self._starting, self._is_stopped = threading.Lock(), False
        self._thread = threading.Thread(target=self._listen, name="burst-listener", daemon=True)

    @classmethod
    def from_prepared_model(
        cls,
        requests: Descriptor,
        results: Descriptor,
        callback: Channel,
        execute: Callable[[Request], Result],
        on_end: Callable[[], None] = _nothing,
    ) -> BurstServer:
        """For a device that can only execute synchronously; memory is still mapped once and kept."""
        return cls(requests, results, callback, lambda request: _Synchronous(request, execute), on_end)

    def start(self, spin: float) -> None:
        """Begins listening, unless it was stopped already. `spin`: seconds to poll for a request before sleeping."""
        self._reader.spin = spin
        with self._starting:
            if not self._is_stopped:
                self._thread.start()

    def stop(self) -> None:
        """Ends the burst. A running execution finishes first; its result is dropped."""
        self._callback.shutdown()
        self._reader.close()
        with self._starting:
            is_mine = not self._is_stopped and self._thread.ident is None
            self._is_stopped = True
        if is_mine:
            self._end()

    def free_memory(self, slot: int) -> None:
        """The client needs that slot no more. Returns at once; memory in use is let go after the run."""
        self._executor.free_memory(slot)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the listener has freed everything."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _listen(self) -> None:
        try:
            self._serve()
        except (FmqError, GeneralFailure, ValueError) as end:
            _log.debug("a burst ended: %s", end)
        finally:
            self._end()

    def _end(self) -> None:
        """Frees everything: the listener's last act, or of a `stop` without a listener."""
        self._writer.close()
        self._reader.close()
        self._callback.close()
        self._executor.close()
        on_end, self.on_end = self.on_end, _nothing  # which may lead back to us, too
        on_end()

    def _serve(self) -> None:
        reply = b""
        exchange, answer = self._exchange, self._executor.answer
        while True:
            try:
                raw = exchange(reply)
            except BufferError:
                if reply == FAILURE_PACKET:
                    raise GeneralFailure("the client does not read its results") from None
                reply = FAILURE_PACKET  # a result that is too long for the channel
            else:
                reply = answer(raw)

    def _fetch(self, slots: list[int]) -> list[Memory]:
        """Asks the client, once for all. Raises InvalidArgument for a slot that it does not know."""
        if len(slots) > MAX_FDS:
            raise InvalidArgument(
                f"{len(slots)} new pools in one request; at most {MAX_FDS} can be handed over at once"
            )
        try:
            # Only here, because watches are few and between requests the listener itself sleeps on the life word.
            with self._reader.watch(self._callback.socket):
                message = self._callback.call(["get_memories", slots], timeout=_CALLBACK_TIMEOUT)
        except PeerDied as error:
            raise GeneralFailure(f"the client did not hand over its memory: {error}") from error
        except Timeout as error:
            self.stop()  # an answer that is still to come would be taken for the answer to the next question
            raise GeneralFailure(f"the client did not hand over its memory: {error}") from error
        try:
            return _memories(message, len(slots))
        finally:
            message.close()


def _encode(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing, _text: str) -> bytes:
    """Wire version 1 has no room for words."""
    return encode_result(status, shapes, timing)


def _memories(message: Message, expected: int) -> list[Memory]:
    """All or nothing, from a client that is not trusted."""
    match message.body:
        case [0, list(plains)] if len(plains) == len(message.fds) == expected:
            return _map_all(plains, message.take_fds())
        case [int(status), *_] if status != 0:
            raise InvalidArgument("the client knows no memory for a slot of its request")
        case _:
            raise GeneralFailure("the client's answer to get_memories is malformed")


def _map_all(plains: list[object], fds: list[int]) -> list[Memory]:
    try:
        return [Memory.from_wire(plain, fds.pop(0)) for plain in plains]
    except Malformed as error:
        raise GeneralFailure(f"the client handed over memory that cannot be used: {error}") from error
    finally:
        close_all(fds)


class _Synchronous:
    """Makes an Execution of a synchronous `execute`."""

    is_static = False

    def __init__(self, request: Request, execute: Callable[[Request], Result]) -> None:
        self._request, self._execute = request, execute
        self.shapes: Sequence[OutputShape] = ()

    def run(self) -> None:
        result = self._execute(self._request)
        result.raise_for_status()
        self.shapes = result.output_shapes
