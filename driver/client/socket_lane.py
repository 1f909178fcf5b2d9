"""The lane of one connection: every execution that is not a burst's goes this way, past the service to the engine.

What a caller waits for, a plain execution or the launch of a fenced one, is one send and one receive in the caller's
thread, on a socket that is its own meanwhile; calls at the same time have sockets of their own, which are kept. What is
launched without waiting goes through one more, whose answers a thread takes (`driver.client.answer_thread`). All share
one table of slots here, and one of memory, plans and executions in the engine.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import ref

from burst import ErrorStatus, InvalidArgument, Malformed, Result, Timeout, Timing
from burst.channel import Message, close_all
from burst.dropped import DropList
from burst.errors import status_error
from burst.slots import SlotTable
from driver.client.answer_thread import AnswerThread
from driver.client.fenced import SUCCESS, Ending, ExecutionInfo, FencedExecution, duplicates
from driver.client.lane_socket import MOST_NUMBERS, LaneSocket
from driver.deadlines import seconds_left
from driver.errors import DriverError
from driver.protocol.lane_codec import (
    LAUNCHED,
    decode_outcome,
    fields_of,
    launch_behind,
    question,
)
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    import select
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from burst import Memory, Request
    from driver.client.completion import Completion
    from driver.client.connection import Connection
    from driver.client.job import Job
    from driver.client.stream_feed import StreamFeed
    from driver.client.workspace import KnownRequest
    from driver.protocol.stream_terms import StreamTerms

_MANY = 64  # outcomes that are not wanted any more, of which the device is told at once


class Moved(Exception):
    """The connection has retired, and nothing was sent: another connection of the device has taken its place."""


class SocketLane:
    """The lane of one connection. Any thread may use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pid = ref(connection), os.getpid()
        self._dropped = DropList(self._tell)
        self._slots = SlotTable(self._dropped)
        self.free_memory: Callable[[Memory], None] = self._slots.free_memory
        self._idle: list[LaneSocket] = []
        self.sockets: list[LaneSocket] = []  #: those that are open
        self._answers: AnswerThread | None = None
        self._opening, self._is_closed = Lock(), False
        self._numbers = count(1)
        self._answer = b"", Result(ErrorStatus.NONE)
        self._ended: tuple[bytes, Ending] = b"", SUCCESS
        self.forgotten: deque[int] = deque()  #: outcomes of which the device is to be told
        self._users: deque[None] = deque()  # one for each call that goes on
        self._unasked: set[int] = set()  # fenced executions whose endings may still be asked for
        self._is_retired = False

    # ---- retirement

    def retire(self) -> bool:
        """Refuse new executions from now on, and return True, if nothing of the earlier ones is still to come."""
        self._is_retired = True  # before looking: who begins later looks at it
        answers = self._answers
        is_idle = not (self._users or self._unasked or (answers and answers.is_busy))
        self._is_retired = is_idle
        return is_idle

    def resume(self) -> None:
        """Take executions again."""
        self._is_retired = False

    def _enter(self) -> None:
        """Begin to use the lane, as one of `_users` until that is popped. Raise Moved."""
        self._users.append(None)
        if self._is_retired:
            self._users.pop()
            raise Moved

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._users.pop()

    # ---- sockets

    def _take(self, end: int | None = None) -> LaneSocket:
        """Return a socket for one call, its lock held. Raise StatusError, PeerDied, Timeout, Moved."""
        self._enter()
        try:
            try:
                socket = self._idle.pop()
            except IndexError:
                socket = self._opened(end)
            socket.lock.acquire()
        except BaseException:
            self._users.pop()
            raise
        return socket

    def _put(self, socket: LaneSocket) -> None:
        """Keep a socket for the next call: no answer is on its way on it."""
        self._users.pop()
        socket.lock.release()
        self._idle.append(socket)
        if socket.freed:
            socket.tell_freed()
        if self._is_closed:
            self._close_idle()

    def _end(self, socket: LaneSocket) -> None:
        """Close a socket after an error, because an answer may still be on its way on it."""
        self._users.pop()
        socket.lock.release()
        socket.channel.close()
        _remove(self.sockets, socket)

    def _opened(self, end: int | None = None) -> LaneSocket:
        connection = self._connection()
        assert connection
        socket = LaneSocket(connection.to_engine(seconds_left(end)), self._slots)
        self.sockets.append(socket)
        return socket

    def _tell(self, slots: list[int]) -> None:
        """Tell the device of memory that the application has dropped or freed."""
        self._slots.forget(slots)
        for socket in list(self.sockets):
            socket.free(slots)

    # ---- in turn

    def execute(self, model: int, job: Job, known: KnownRequest) -> Result:
        """Execute it, and wait for the answer. `known` stands for its request.

        Raise PeerDied, and Timeout at the end of its wait.
        """
        end = job.wait.end
        socket = self._take(end)
        try:
            request = socket.encoded(model, job.request, known, job.measure)
            timeout = None if end is None else seconds_left(job.wait.last)
            raw = socket.ask(next(self._numbers), end, request, timeout)
        except InvalidArgument as error:  # nothing was sent
            self._put(socket)
            return error.as_result()
        except BaseException:
            self._end(socket)
            raise
        self._put(socket)
        known_answer = self._answer
        if raw != known_answer[0]:
            known_answer = self._answer = raw, Result(*decode_outcome(raw))
        result = known_answer[1]
        if result.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT:
            socket.send_anew(job.request)
        if end is not None and not result.status and clock.now() > end:
            raise Timeout("the result came after the deadline")
        return result

    # ---- behind fences

    def launch(
        self, model: int, job: Job, known: KnownRequest, outputs: Callable[[], tuple[NDArray[Any], ...]]
    ) -> FencedExecution:
        """Launch it behind its fences; `outputs` makes the arrays of the result. Raise StatusError, PeerDied."""
        number = next(self._numbers)
        terms = len(job.after), number, job.wait.end, job.duration

        def message(socket: LaneSocket) -> bytes:
            return launch_behind(*terms, socket.encoded(model, job.request, known, job.measure))

        self._unasked.add(number)
        try:
            with duplicates(job.after) if job.after else nullcontext(list[int]()) as fds:
                answer = self._asked(message, fds, job.wait.end)
            return self._launched(number, job, answer, outputs)
        except BaseException:
            self._unasked.discard(number)
            raise

    def _launched(
        self, number: int, job: Job, answer: Message, outputs: Callable[[], tuple[NDArray[Any], ...]]
    ) -> FencedExecution:
        fences = answer.fds  # ours from now on
        if answer.raw[10:] != LAUNCHED:
            close_all(fences)
            status, _, _, _, text, cause = decode_outcome(answer.raw[10:])
            if status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT:
                for socket in list(self.sockets):  # it went on one of them
                    socket.send_anew(job.request)
            raise status_error(status, text, cause)
        if len(fences) != 1:
            close_all(fences)
            raise Malformed("the device has launched an execution without a fence")
        ask, forget = partial(self.ending, number), partial(self.forget, number)
        success = None if job.measure else partial(self.success, number)
        return FencedExecution(fences.pop(), ask, outputs, watch=self._watch, forget=forget, success=success)

    def _asked(self, message: Callable[[LaneSocket], bytes], fds: list[int], end: int | None = None) -> Message:
        """Send what `message` makes, and return the answer. `end`: of the wait for a socket, if one is opened."""
        socket = self._take(end)
        try:
            if len(self.forgotten) >= _MANY:
                self._tell_forgotten(socket)
            answer = socket.exchange(message(socket), fds)
        except InvalidArgument:  # nothing was sent
            self._put(socket)
            raise
        except BaseException:
            self._end(socket)
            raise
        self._put(socket)
        return answer

    def _tell_forgotten(self, socket: LaneSocket) -> None:
        while len(self.forgotten) >= _MANY:
            numbers = list[int]()
            with suppress(IndexError):  # another thread has told the device of the last ones
                while len(numbers) < MOST_NUMBERS:
                    numbers.append(self.forgotten.popleft())
            try:
                socket.channel.send(["forget", *numbers])
            except BaseException:
                self.forgotten.extend(numbers)  # another socket will take them
                raise

    def ending(self, number: int) -> Ending:
        """Return how an execution ended. Raise GeneralFailure while it is pending, PeerDied."""
        self._check_process()
        answer = self._asked(lambda _: question(next(self._numbers), number), [])
        raw, known = self._ended
        if answer.raw[10:] != raw:
            known = _ending_in(answer)
            self._ended = answer.raw[10:], known
        self.forget(number)
        return known

    def success(self, number: int) -> Ending:
        """Return the ending of an execution that has succeeded and was not measured. Raise DriverError."""
        self._check_process()
        self.forget(number)
        return SUCCESS

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DriverError("this execution was launched before a fork; use it in the process that launched it")

    def forget(self, number: int) -> None:
        """Let the device drop the outcome; it is told with a later call. Finalizers may call this."""
        self.forgotten.append(number)
        self._unasked.discard(number)

    def _watch(self, poll: select.poll) -> None:
        """Make `poll` return when the device dies or the connection ends."""
        connection = self._connection()
        fd = -1 if connection is None else connection.channel.fileno()
        if fd >= 0:
            poll.register(fd, 0)  # no events besides hang-up and error, which poll always reports

    # ---- without waiting

    def begin(self, model: int, job: Job, known: KnownRequest, finish: Callable[[Result], Result]) -> Completion:
        """Launch it; `finish` makes of the device's result the caller's.

        Raise InvalidArgument, Malformed, PeerDied, and Timeout if there is no socket for them by its end.
        """
        with self._in_use():
            answers = self._answers
            if answers is None or answers.is_over:
                answers = self._first_answers(job.wait.end)
            return answers.launch(next(self._numbers), (model, job, known), finish)

    def open_stream(self, model: int, requests: Sequence[Request], terms: StreamTerms, feed: StreamFeed) -> None:
        """Open a stream, whose results go to `feed`. `terms`: without its number and requests.

        Raise InvalidArgument, Malformed, PeerDied, and Timeout if there is no socket for it by its end.
        """
        with self._in_use():
            answers = self._answers
            if answers is None or answers.is_over:
                answers = self._first_answers(None if terms.end == FOREVER else terms.end)
            number = next(self._numbers)

            def message(socket: LaneSocket) -> bytes:
                packed = (socket.packed(model, request, False) for request in requests)
                return terms._replace(number=number, requests=tuple(packed)).pack()

            feed.close, feed.give_room = partial(answers.end_stream, number), partial(answers.give_room, number)
            answers.open_stream(number, message, feed)

    def _first_answers(self, end: int | None) -> AnswerThread:
        """Return the thread of asynchronous executions, after another caller that opens a socket for it, if any."""
        seconds = seconds_left(end)
        if not self._opening.acquire(timeout=-1 if seconds is None else seconds):
            raise Timeout("no socket for asynchronous executions was opened in time")
        try:
            answers = self._answers
            if answers is None or answers.is_over:
                answers = self._answers = self._answered_on(self._opened(end))
            return answers
        finally:
            self._opening.release()

    def _answered_on(self, socket: LaneSocket) -> AnswerThread:
        on_end = partial(_remove, self.sockets, socket)
        try:
            return AnswerThread(socket, on_end)
        except BaseException:
            socket.channel.close()
            on_end()
            raise

    # ---- the end

    def close(self) -> None:
        """End it; the device frees what belongs to it. Fenced executions that are pending are not run."""
        self._is_closed = True
        self._close_idle()
        if self._answers:
            self._answers.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().channel.close()


def _remove(sockets: list[LaneSocket], socket: LaneSocket) -> None:
    with suppress(ValueError):
        sockets.remove(socket)


def _ending_in(answer: Message) -> Ending:
    """Return how a fenced execution ended, as the device has told it. Raise Malformed."""
    match answer.body:
        case [_, outcome, [device, driver]]:
            status, _, _, launched, text, cause = fields_of(outcome)
            return Ending(ExecutionInfo(status, launched, Timing(device, driver)), text, cause)
        case _:
            raise Malformed("the device's answer about a fenced execution is malformed")
