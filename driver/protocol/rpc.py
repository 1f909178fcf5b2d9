"""Calls between client, service and engine: [number, method, arguments…] one way, [number, status, values…] the other.

A status other than NONE is followed by a text and perhaps by a cause; the calling side raises burst's exception for it.
The caller chooses the number: a caller whose wait was interrupted or timed out recognises the late answer by it and
drops it.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from burst import ErrorStatus, Malformed, PeerDied, ResourceExhaustedTransient, StatusError, Timeout
from burst.channel import Message, close_all, pack
from burst.errors import DeviceEnd, status_error
from burst.exhaustion import DescriptorsLost, exhausted
from burst.messages import NO_CAUSE, Cause, Phase
from driver.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from burst.channel import Channel

_log = logging.getLogger(__name__)
PROTOCOL = 5  # version of the calls between client and service; `hello` compares it
_MAX_TEXT = 1000
_LOOK = 1.0  # seconds without an answer, after which the caller looks what holds it up
_FIRST_CALL = 1.0  # seconds that a peer which is refused may take for it
SPEAK_WITHIN = 30.0
"""Seconds until the first call of a connection, which holds a place."""
READ_WITHIN = 5.0
"""Seconds that a peer has for its earlier answers, before one with descriptors."""
_PHASES = get_args(Phase)
_numbers = count()  # of calls in this process


class Reply(NamedTuple):
    """The answer of a handler: plain values, and descriptors, which are closed after sending."""

    values: Sequence[object] = ()
    fds: Sequence[int] = ()


def end_message(end: DeviceEnd) -> list[object]:
    """Return the message in which a service tells each client why it ends."""
    return [-1, end.words[:_MAX_TEXT], int(end.status)]


def end_of(channel: Channel, timeout: float) -> DeviceEnd:
    """Return the end of the service at the other end, as far as it has told of it."""
    with suppress(PeerDied, Timeout, Malformed):
        while not channel.device_end.words:
            message = channel.receive(timeout)
            message.close()
            _note_end(channel, message.body)
    return channel.device_end


def _note_end(channel: Channel, body: list[Any]) -> bool:
    """Note what the message tells of the device's end; return False if it tells of none."""
    match body:
        case [-1, str(words), *more]:
            end = DeviceEnd(words, *more[:1])
            channel.note_end(lambda: end)
            return True
    return False


def call(
    channel: Channel,
    method: str,
    *arguments: object,
    fds: Sequence[int] = (),
    timeout: float | None = None,
    look: Callable[[], object] | None = None,
) -> tuple[list[Any], list[int]]:
    """Return the values and descriptors of the answer; the caller closes the latter. `look` is called again and again
    while there is none, and may raise. Raise StatusError, PeerDied, Timeout.
    """
    number, end = next(_numbers), None if timeout is None else time.monotonic() + timeout
    gone: PeerDied | None = None
    try:
        channel.send([number, method, *arguments], fds)
    except PeerDied as error:
        gone, end = error, time.monotonic()  # it may have said why
    while True:
        try:
            message = _received(channel, end, None if gone else look)
        except DescriptorsLost as error:
            raise exhausted(error, "this process") or error from error
        except (PeerDied, Timeout):
            if gone:
                raise gone from None
            raise
        try:
            body = message.body
            if _note_end(channel, body):
                raise channel.gone()
            match body:
                case [int(earlier), *_] if earlier < number:
                    continue
                case [_, 0, *values]:
                    return values, message.take_fds()
                case [_, int(status), str(text), *more] if status in tuple(ErrorStatus):
                    raise status_error(ErrorStatus(status), text, cause_in(more))
                case _:
                    raise Malformed(f"the answer to {method!r} is malformed")
        finally:
            if message.fds:
                message.close()


def _received(channel: Channel, end: float | None, look: Callable[[], object] | None) -> Message:
    """Return the next message. Raise what `Channel.receive` does, and what `look` does."""
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if look is None:
            return channel.receive(left)
        try:
            return channel.receive(_LOOK if left is None else min(_LOOK, left))
        except Timeout:
            look()
            if left is not None and left <= _LOOK:
                raise


def serve(
    channel: Channel,
    handlers: Mapping[str, Callable[..., Reply]],
    take: Callable[..., AbstractContextManager[object]] = lambda _, **__: nullcontext(),
) -> None:
    """Answer calls until the peer is gone. A handler gets the message, for its descriptors, then the arguments.

    `take(remedy, descriptors=…)` counts the descriptors of a call until it is answered. Raise StatusError.
    """
    while True:
        lost: DescriptorsLost | None = None
        try:
            message = channel.receive()
        except DescriptorsLost as error:
            message, lost = Message(error.raw, []), error
        except (PeerDied, Malformed):  # gone, or out of bounds
            return
        number: object = None
        try:
            number, *request = message.body
            with take("send fewer at a time", descriptors=len(message.fds)) if message.fds else nullcontext():
                reply, status = failure(lost) if lost else (_handle(request, message, handlers), ErrorStatus.NONE)
        except PeerDied:
            return
        except Exception as error:  # noqa: BLE001 (one bad call must not end a process that serves many)
            reply, status = failure(error)
        finally:
            if message.fds:
                message.close()
        try:
            _answer(channel, number, status, reply)
        except (PeerDied, Malformed):  # gone, or its number is longer than a message
            return
        finally:
            if reply.fds:
                close_all(list(reply.fds))


def _answer(channel: Channel, number: object, status: ErrorStatus, reply: Reply) -> None:
    """Send an answer. Raise PeerDied.

    Also for a peer that lets answers with descriptors lie: until it has received those, they count for this account,
    and at some number no process of the account can send any.
    """
    if reply.fds and not channel.await_reader(READ_WITHIN):
        raise PeerDied(f"the other side has not read its messages for {READ_WITHIN:g} s")
    try:
        channel.send([number, int(status), *reply.values], reply.fds)
    except ResourceExhaustedTransient as error:
        refused, status = failure(error)
        channel.send([number, int(status), *refused.values])


def refuse(channel: Channel, error: Exception) -> None:
    """Answer the first call of a connection that cannot be served with an error, and close the connection.

    It must read the call first: closing a socket with unread data also drops data on its way to the client.
    """
    with channel, suppress(PeerDied, Timeout, Malformed, OSError):
        channel.receive(_FIRST_CALL).close()
        reply, status = failure(error)
        channel.send([None, int(status), *reply.values])


def refuse_unheard(channel: Channel, error: Exception) -> None:
    """Send the error as the answer to a connection's first call, which is not read and may not have come yet.

    The caller closes the connection.
    """
    reply, status = failure(error)
    with suppress(PeerDied, Malformed):
        channel.send_at_once(pack([None, int(status), *reply.values]))


def failure(error: Exception) -> tuple[Reply, ErrorStatus]:
    """Return the answer to a call that raised this error. Logs errors that no handler should raise."""
    if isinstance(error, StatusError):
        return _words(error, cause=error.as_cause()), error.status
    if found := exhausted(error):
        return _words(found), found.status
    match error:
        case InvalidModel() | Malformed() | TypeError() | ValueError():
            return _words(error), ErrorStatus.INVALID_ARGUMENT
    _log.error("a call failed unexpectedly", exc_info=error)
    return _words(error, f"{type(error).__name__}: ", remedy=beyond_the_sandbox(error)), ErrorStatus.GENERAL_FAILURE


def beyond_the_sandbox(error: BaseException) -> str:
    """Return the remedy for a file that a device may not open; "": that is not what the error is about."""
    if not isinstance(error, PermissionError) or not error.filename:
        return ""
    return f"; the sandbox: a device opens the files that it names, needs = Needs(read_paths=({error.filename!r},))"


def _words(error: Exception, name: str = "", cause: Cause = NO_CAUSE, remedy: str = "") -> Reply:
    """Return the error as text, cut to what fits into a message whatever the client made it quote."""
    more = [] if cause == NO_CAUSE else [cause]
    return Reply([f"{name}{error}{remedy}"[:_MAX_TEXT], *more])


def cause_in(more: list[Any]) -> Cause:
    """Return the cause that may follow an error's text: [phase, late by, retry after], each a value or nil."""
    match more:
        case [[str() | None as phase, float() | None as late_by, float() | None as retry_after], *_]:
            known = cast("Phase | None", phase) if phase in _PHASES else None
            return Cause(known, late_by, retry_after)
        case _:
            return NO_CAUSE


def _handle(request: list[Any], message: Message, handlers: Mapping[str, Callable[..., Reply]]) -> Reply:
    match request:
        case [str(method), *arguments] if method in handlers:
            return handlers[method](message, *arguments)
        case _:
            raise Malformed("unknown method")


def take_fd(message: Message) -> int:
    """Take the only descriptor of a message; the caller closes it. Raise Malformed."""
    if len(message.fds) != 1:
        raise Malformed(f"{len(message.fds)} descriptors came; the call takes one")
    return message.fds.pop()
