"""Asks a device, in a process apart, which operations it supports: for devices that call code of others.

Such code may crash or never return. The process opens the device, answers one model after the other, and lives until it
is closed, crashes, or takes too long; the next question gets a fresh one. So the code never runs in the service's own
process. Each account has a process of its own: no account waits for another's answer, or gets it from code that a model
of another's has confused.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from burst import ErrorStatus, GeneralFailure, Malformed, PeerDied, Timeout
from burst.channel import close_all
from burst.errors import status_error
from driver.errors import signal_name
from driver.nn.known import explained
from driver.protocol.model_codec import decode, sealed
from driver.protocol.rpc import failure, take_fd
from driver.service.fork_server import ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from burst.channel import Channel, Message
    from driver.interface import Device

_MOST_NAME = 64  # bytes of the name of a function
_PLACES = mmap.PAGESIZE // _MOST_NAME
_MOST_IDLE = 4  # processes
_MOST_BYTES = 64 << 20  # of an answer
_OF_RESOURCES = {ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT}


class SupportQuery:
    """A place to ask one device what it supports. Safe from any thread."""

    def __init__(self, device: Device, seconds: float, most: int) -> None:
        """Fork, as `ForkServer` does, which takes `most`. `seconds`: that an answer may take."""
        self._name, self._seconds = device.name, seconds
        self._during = mmap.mmap(-1, mmap.PAGESIZE)
        self._server = ForkServer(device, partial(_answer_all, device, self._during), most)
        self._changing = threading.Lock()
        self._places, self._idle = list(range(_PLACES)), dict[int, QueryProcess]()

    def explain(
        self, uid: int, fds: Sequence[int], where: Any, extensions: Sequence[str], count: int
    ) -> list[str | None]:
        """Return a reason for each operation of that account's valid model that is not supported, else None.

        `fds`, `where`: the model, which has `count` operations.

        Raise StatusError: also when the process ends, or is ended because it takes too long.
        """
        process = self._taken(uid)
        try:
            return process.explain(fds, where, extensions, count)
        finally:
            self._put_back(uid, process)

    def _taken(self, uid: int) -> QueryProcess:
        """Return a process that nothing else asks. Raise GeneralFailure."""
        with self._changing:
            if found := self._idle.pop(uid, None):
                return found
            if not self._places:
                raise GeneralFailure(f"driver {self._name!r} is asked by too many at once; try again later")
            place = self._places.pop()
        return QueryProcess(self._name, self._seconds, self._server, self._during, place=place)

    def _put_back(self, uid: int, process: QueryProcess) -> None:
        with self._changing:
            if process.is_alive and uid not in self._idle and len(self._idle) < _MOST_IDLE:
                self._idle[uid] = process
                return
            self._places.append(process.place)
        process.close()


class QueryProcess:
    """A process that answers for the device. One thread at a time."""

    def __init__(self, name: str, seconds: float, server: ForkServer, during: mmap.mmap, place: int) -> None:
        """`place`: where in `during` it says which function it calls."""
        self._name, self._seconds, self._server, self.place = name, seconds, server, place
        start = place * _MOST_NAME
        self._during = memoryview(during)[start : start + _MOST_NAME]
        self._during[:] = bytes(_MOST_NAME)
        self._channel: Channel | None = None

    @property
    def is_alive(self) -> bool:
        """True if it can be asked again."""
        return self._channel is not None

    def explain(self, fds: Sequence[int], where: Any, extensions: Sequence[str], count: int) -> list[str | None]:
        """Return the reasons, as `SupportQuery.explain` does."""
        try:
            channel = self._living()
            channel.send([where, list(extensions), self.place], fds)
            message = channel.receive(self._seconds)
        except Timeout:
            self.close()
            raise GeneralFailure(
                f"{self._what} did not return within {self._seconds:g} s; its process was ended"
            ) from None
        except (PeerDied, Malformed) as error:
            self.close()
            raise GeneralFailure(f"driver {self._name!r} can be asked no more: start the device again") from error
        try:
            return self._reasons(message, count)
        finally:
            message.close()

    def _living(self) -> Channel:
        """Return the channel of the process, or of a new one if it was ended while nobody asked it: it said so.

        Raise PeerDied.
        """
        if self._channel is not None and self._channel.await_message(0):
            self.close()
        if self._channel is None:
            self._channel = self._server.begin()
        return self._channel

    def _reasons(self, message: Message, count: int) -> list[str | None]:
        match message.body:
            case ["refused", int(status), str(text), *_] if 0 < status <= max(ErrorStatus):
                if status in _OF_RESOURCES:
                    self.close()  # it is ended for the memory that it took
                raise status_error(ErrorStatus(status), text)
            case ["ended", int(code), str(words)]:
                self._tell_end(code, words)
        try:
            return _checked(_read(take_fd(message)), count)
        except (Malformed, ValueError, msgpack.UnpackException) as error:
            self.close()
            raise GeneralFailure(f"{self._what} left no readable answer: {error}") from error

    @property
    def _what(self) -> str:
        """The device, and the function that it calls or called last."""
        name = bytes(self._during).rstrip(b"\0").decode(errors="replace")
        return f"driver {self._name!r}: {name or 'its start'}"

    def _tell_end(self, code: int, words: str) -> NoReturn:
        self.close()
        how = f"with {signal_name(-code)}" if code < 0 else f"with exit status {code}"
        said = f'; its last words: "{words}"' if words else ""
        raise GeneralFailure(f"{self._what} ended its process {how}{said}")

    def close(self) -> None:
        """End the process."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _read(fd: int) -> Any:
    try:
        size = os.fstat(fd).st_size
        if size > _MOST_BYTES:
            raise Malformed(f"it has {size} bytes; at most {_MOST_BYTES} are read")
        return msgpack.unpackb(os.pread(fd, size, 0))
    finally:
        os.close(fd)


def _checked(reasons: Any, count: int) -> list[str | None]:
    is_list = isinstance(reasons, list) and all(isinstance(reason, str | None) for reason in reasons)
    if not is_list or len(reasons) != count:
        raise Malformed(f"it is not {count} reasons")
    return list(reasons)


# ---- the process that is asked


def _answer_all(device: Device, during: mmap.mmap, channel: Channel) -> None:
    start = 0

    @contextmanager
    def noted(function: str) -> Iterator[None]:
        name = function.encode()[:_MOST_NAME]
        during[start : start + _MOST_NAME] = name + bytes(_MOST_NAME - len(name))
        yield

    device.watched, device.give_up = noted, _end_without
    with suppress(PeerDied):
        while True:
            message = channel.receive()
            try:
                where, extensions, place = message.body
                start = place * _MOST_NAME
                _answer(device, channel, where, extensions, fds=message.take_fds())
            except Exception as error:  # noqa: BLE001 (whatever it is, it is the answer)
                reply, status = failure(error)
                channel.send(["refused", int(status), *reply.values])


def _end_without(reason: str) -> NoReturn:
    """End this process, for which the hardware is lost; the next question gets another one."""
    os.write(2, reason.encode())
    os._exit(1)


def _answer(device: Device, channel: Channel, where: Any, extensions: list[str], fds: list[int]) -> None:
    model = decode(sealed(fds, where), where[:2])
    answer = msgpack.packb(explained(model, extensions, device.explain, device.hal_version))
    memory = os.memfd_create("answer", os.MFD_CLOEXEC)
    try:
        os.write(memory, answer)
        channel.send(["answered"], [memory])
    finally:
        close_all([memory])
