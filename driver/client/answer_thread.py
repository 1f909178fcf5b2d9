"""The thread that takes the answers to asynchronous executions: many are in flight on one socket of the lane.

It completes them, calls their callbacks, and ends the wait of those that the device does not answer in time. The first
`execute_async` starts it, and it ends with the connection.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import ErrorStatus, Malformed, PeerDied, Result, StatusError, Timeout
from burst.channel import Channel
from driver.client.completion import Completion
from driver.protocol.lane_codec import fields_of, launch
from driver.protocol.stream_terms import GOES_ON, MOST_ROOM
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from driver.client.job import Job
    from driver.client.lane_socket import LaneSocket
    from driver.client.stream_feed import StreamFeed
    from driver.client.workspace import KnownRequest
    from driver.deadlines import Wait

_LONGEST = 10**6  # milliseconds that one poll may take
_UNKNOWN = "nothing is known of this execution"
_MOST_AT_ONCE = 4096  # answers before callbacks, so that they come while a program goes on launching
_MOST_OF_STREAMS = 64  # the same where streams are open, whose answers need no request of the program's


class _Launched(NamedTuple):
    completion: Completion
    request: Request  # keeps its pools
    finish: Callable[[Result], Result]
    wait: Wait


class AnswerThread:
    """A thread that completes the executions launched on its socket. Any thread may launch."""

    def __init__(self, socket: LaneSocket, on_end: Callable[[], object]) -> None:
        """Start the thread. `on_end`: called when it has closed the socket; it does not refer to this object."""
        self._on_end = on_end
        self._socket, self._channel, self._pid = socket, socket.channel, os.getpid()
        self._pending: dict[int, _Launched] = {}
        self._streams: dict[int, StreamFeed] = {}
        self.is_over = False  #: nothing can be launched any more
        self._next_end = FOREVER  # that the thread knows
        self._is_held = False  # the thread keeps this object while executions are pending
        self._wake, far = Channel.pair()  # its other end ends with this object, and so does the thread
        arguments = weakref.ref(self), socket.channel.fileno(), far
        threading.Thread(target=_complete, args=arguments, name="burst-async", daemon=True).start()

    def launch(
        self, number: int, asked: tuple[int, Job, KnownRequest], finish: Callable[[Result], Result]
    ) -> Completion:
        """Launch a job for a prepared model. Raise InvalidArgument, Malformed, PeerDied."""
        model, job, known = asked
        wait, completion = job.wait, Completion()
        completion.give_up = partial(self._cancel, number)
        socket = self._socket
        with socket.lock:
            message = launch(number, wait.end, None, socket.encoded(model, job.request, known, job.measure))
            self._pending[number] = _Launched(completion, job.request, finish, wait)
            try:
                self._channel.send_raw(message)
            except BaseException:
                self._pending.pop(number, None)
                raise
        socket.tell_freed()
        end = FOREVER if wait.last is None else wait.last
        if end < self._next_end or not self._is_held:
            self._next_end = min(end, self._next_end)
            self._wake.send([])
        return completion

    def open_stream(self, number: int, message: Callable[[LaneSocket], bytes], feed: StreamFeed) -> None:
        """Send what `message` makes, which opens a stream, whose results go to `feed`. Raise as `launch` does."""
        with self._socket.lock:
            raw = message(self._socket)
            self._streams[number] = feed
            try:
                self._channel.send_raw(raw)
            except BaseException:
                self._streams.pop(number, None)
                raise
        self._socket.tell_freed()
        if not self._is_held:
            self._wake.send([])

    def give_room(self, number: int, room: int) -> None:
        """Let a stream write so many results in all."""
        with suppress(PeerDied):  # its feed learns of that
            self._channel.send(["go_on", number, room])

    def end_stream(self, number: int) -> None:
        """End a stream whose results nobody wants any more."""
        if self._streams.pop(number, None) and not self.is_over and os.getpid() == self._pid:
            with suppress(PeerDied):
                self._channel.send(["cancel", number])

    def _cancel(self, number: int) -> None:
        if self._take(number) and not self.is_over and os.getpid() == self._pid:
            with suppress(PeerDied):
                self._channel.send(["cancel", number])

    def _take(self, number: int) -> _Launched | None:
        """Remove an execution and return it, for the thread that completes it; None: another thread has it."""
        return self._pending.pop(number, None)

    @property
    def is_busy(self) -> bool:
        """True if executions are pending, or streams are open."""
        return bool(self._pending or self._streams)

    def close(self) -> None:
        """End the connection: what is pending gets PeerDied."""
        self._channel.shutdown()

    # ---- the thread

    def hold(self) -> bool:
        """Return True if executions are pending: then the thread keeps this object until `step` returns False."""
        self._is_held = False  # before looking: an execution that is launched meanwhile wakes the thread
        self._is_held = bool(self._pending or self._streams)
        return self._is_held

    def patience(self) -> int | None:
        """Return the milliseconds to the next deadline, rounded up; None: there is none."""
        self._next_end = FOREVER  # before looking, as above
        ends = [launched.wait.last for launched in list(self._pending.values()) if launched.wait.last is not None]
        self._next_end = min(ends, default=FOREVER)
        if self._next_end == FOREVER:
            return None
        return min(max(0, -(-(self._next_end - clock.now()) // 1_000_000)), _LONGEST)

    def step(self) -> bool:
        """Complete what has been answered, and what is too late; then call back. False when the connection has ended.

        Callbacks come last: they are the program's, and may take their time.
        """
        done = list[Completion]()
        try:
            self._drain(done)
            self._expire(done)
        except (PeerDied, Malformed) as error:
            self._end(error, done)
        for completion in done:
            completion.call_back()
        return not self.is_over

    def _drain(self, done: list[Completion]) -> None:
        with suppress(Timeout):
            for _ in range(_MOST_OF_STREAMS if self._streams else _MOST_AT_ONCE):
                message = self._channel.receive(0)
                message.close()
                self._answered(message.body, done)

    def _expire(self, done: list[Completion]) -> None:
        now = clock.now()
        for number, launched in list(self._pending.items()):
            last = launched.wait.last
            if last is not None and now >= last and self._take(number):
                done.append(launched.completion)
                launched.completion.conclude(launched.wait.given_up)
                with suppress(PeerDied):
                    self._channel.send(["cancel", number])

    def _answered(self, body: list[Any], done: list[Completion]) -> None:
        match body:
            case [int(number), list(outcome)]:
                fields = fields_of(outcome)
            case [int(number), list(outcome), int(goes_on), int(count)] if 1 <= count <= MOST_ROOM:
                self._steps_answered(number, Result(*fields_of(outcome)), goes_on, count)
                return
            case _:
                raise Malformed("the device sent a malformed answer")
        launched = self._take(number)
        if launched is None:
            return  # it was cancelled, or we have stopped waiting
        done.append(launched.completion)
        result, wait = Result(*fields), launched.wait
        if result.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT:
            self._socket.send_anew(launched.request)
        is_late = wait.end is not None and clock.now() > wait.end
        if is_late and (wait.ends_by_timeout or not result.status):
            launched.completion.conclude(wait.given_up)
        else:
            launched.completion.conclude(lambda: launched.finish(result))

    def _steps_answered(self, number: int, result: Result, goes_on: int, count: int) -> None:
        feed = self._streams.get(number) if goes_on == GOES_ON else self._streams.pop(number, None)
        if feed:
            feed.take(result, goes_on, count)

    def _end(self, error: Exception, done: list[Completion]) -> None:
        self.is_over = True  # before the pending ones end: what is launched after that cannot be sent
        self._channel.shutdown()  # first: a launch that waits for room holds the lock
        with self._socket.lock:
            self._channel.close()
        self._on_end()
        told = error.as_result() if isinstance(error, StatusError) else None
        while self._streams:
            with suppress(KeyError):  # it was closed meanwhile
                _, feed = self._streams.popitem()
                feed.fail(error)
        while self._pending:
            with suppress(KeyError):  # it was cancelled meanwhile
                _, launched = self._pending.popitem()
                completion = launched.completion
                done.append(completion.finish(told) if told else completion.fail(PeerDied(f"{error}; {_UNKNOWN}")))


def _complete(reference: weakref.ref[AnswerThread], channel: int, wake: Channel) -> None:
    """Run the thread. It keeps the client alive while executions are pending."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(wake, select.POLLIN)
    goes_on = True
    while goes_on and (client := reference()) is not None:
        milliseconds = client.patience()
        if not client.hold():
            del client
        poll.poll(milliseconds)
        with suppress(Timeout, PeerDied):
            wake.receive(0)
        client = reference()
        goes_on = client is not None and client.step()
        del client
