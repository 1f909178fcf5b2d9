"""Channels carry everything but the requests of bursts: msgpack with file descriptors over a SOCK_SEQPACKET Unix
socket.

A packet socket keeps message boundaries and the descriptors that belong to a message, so there is no framing to attack.
What arrives is bounded: 64 KiB, 72 descriptors, lists 8 deep, and no ext types. Remote calls, the burst callback and
the burst context travel here.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import logging
import os
import select
import selectors
import socket
import struct
import termios
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgpack

from burst.errors import DeviceEnd, Malformed, PeerDied, ResourceExhaustedTransient, Timeout
from burst.exhaustion import DescriptorsLost
from burst.serving_thread import ServingThread
from fmq import Watch
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_log = logging.getLogger(__name__)
MAX_BYTES = 64 * 1024
MAX_FDS = 72
MAX_DEPTH = 8
_SO_PASSRIGHTS = 83  # Linux 6.16 and later; Python has no name for it
_NESTED = (list, dict)
_ANCILLARY = socket.CMSG_SPACE(253 * 4)
"""Room for all descriptors that a message can have on Linux: the kernel closes those for which there is none, at once
and in the thread that receives.
"""
# Plain integers: `|` and `&` of enumeration members cost more than a system call.
_CLOEXEC, _NO_WAIT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_NO_SIGNAL, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_UNLESS_FULL = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_SHORTAGES, _TRIES, _BREAK = {errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}, 10, 0.01  # seconds
_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # a peer that never reads must not block the sender


class Message(NamedTuple):
    """One message as it arrived: the bytes, and descriptors that now belong to the receiver."""

    raw: bytes
    fds: list[int]

    @property
    def body(self) -> list[Any]:
        """The decoded message. Raises Malformed unless it is a list."""
        try:
            body = msgpack.unpackb(self.raw, max_ext_len=0, ext_hook=_no_ext)
        except (ValueError, msgpack.UnpackException) as error:
            raise Malformed(f"a message of {len(self.raw)} bytes is not msgpack: {error}") from error
        if not isinstance(body, list):
            raise Malformed(f"a message is a list, not {type(body).__name__}")
        if _depth(body) > MAX_DEPTH:
            raise Malformed(f"a message nested deeper than {MAX_DEPTH}")
        return body

    def close(self) -> None:
        """Close the descriptors that `take_fds` did not hand out."""
        close_all(self.fds)

    def take_fds(self) -> list[int]:
        """Return the descriptors. From now on the caller must close them."""
        fds = list(self.fds)
        self.fds.clear()
        return fds


def _depth(body: list[Any]) -> int:
    """Return how deep lists and maps are nested; from one more than is allowed on it is not counted any further."""
    depth, level = 0, list[Any]((body,))
    while level and depth <= MAX_DEPTH:
        below = list[Any]()
        for value in level:
            for part in value.values() if isinstance(value, dict) else value:
                if isinstance(part, _NESTED):
                    below.append(part)
        depth, level = depth + 1, below
    return depth


def _no_ext(code: int, _: bytes) -> NoReturn:
    raise ValueError(f"an ext type, number {code}")  # of length 0, which max_ext_len lets through


def close_all(fds: list[int]) -> None:
    """Close descriptors and empty the list. A program that serves a file can have its close fail; it is closed all the
    same.
    """
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


def refuse_descriptors(sock: socket.socket) -> bool:
    """Have the kernel refuse messages with descriptors to this socket, and to those that a listening one accepts.

    The sender gets EPERM. Otherwise descriptors arrive even where nobody asks for them, and the last one to close such
    a socket closes them. Return False before Linux 6.16, which cannot do so.
    """
    return _pass_rights(sock, 0)


def _pass_rights(sock: socket.socket, value: int) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, value)
    except OSError:
        return False
    return True


def pack(body: Sequence[object]) -> bytes:
    """Return the bytes of a message. Raise Malformed when it is longer than a channel takes."""
    raw: bytes = msgpack.packb(body)
    if len(raw) > MAX_BYTES:
        raise Malformed(f"a message of {len(raw)} bytes; at most {MAX_BYTES} are allowed")
    return raw


class Channel(Closing):
    """One end of a connection. Sending is safe from many threads; receiving belongs to one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        # Closes the socket without a ResourceWarning when the channel is dropped or the interpreter ends.
        self._finalizer = weakref.finalize(self, sock.close)
        self._watch: Watch | None = None
        self._device_end: Callable[[], DeviceEnd] = DeviceEnd
        self.known_uid: int | None = None  #: of its peer, where the kernel cannot name it: in another user namespace
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, of which one goes to the peer."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(near), cls(far)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over `fd`. Raise Malformed when it is no packet socket."""
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise Malformed("the descriptor is not a socket") from error
        if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            sock.close()
            raise Malformed("the descriptor is not a SOCK_SEQPACKET Unix socket")
        sock.setblocking(True)
        return cls(sock)

    def fileno(self) -> int:
        """Return the socket's descriptor, for select and for SCM_RIGHTS."""
        return self.socket.fileno()

    def refuse_descriptors(self) -> bool:
        """Have the kernel refuse descriptors, as `refuse_descriptors` of this module does."""
        return refuse_descriptors(self.socket)

    def accept_descriptors(self) -> None:
        """Take descriptors from now on, on a connection that a listener accepted which refuses them."""
        _pass_rights(self.socket, 1)

    @property
    def peer_uid(self) -> int:
        """The user id of the process that connected, from the kernel."""
        return self._peer_credentials[1] if self.known_uid is None else self.known_uid

    @property
    def is_foreign(self) -> bool:
        """True if the process that connected, or that made the pair, runs under another account."""
        return self.peer_uid != os.getuid()

    @property
    def peer_pid(self) -> int:
        """The process that connected, from the kernel. It may have ended since, and its number be another process's."""
        return self._peer_credentials[0]

    @property
    def _peer_credentials(self) -> tuple[int, int, int]:
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", credentials)
        return pid, uid, gid

    def watch(self, life_fd: int) -> None:
        """End every wait on this channel as soon as the owner of that LifePage dies. Owns the descriptor."""
        self._watch = Watch.of_page(life_fd, self.socket)

    @property
    def peer_has_died(self) -> bool:
        """True if the owner of the watched LifePage is gone: before any of its sockets ends, or from when this one has
        ended, should the kernel have been unable to mark the page.
        """
        return self._watch is not None and (self._watch.has_died or self.has_hung_up)

    @property
    def has_hung_up(self) -> bool:
        """True if the peer has closed its end."""
        poll = select.poll()
        try:
            poll.register(self.socket, 0)
        except ValueError:
            return False  # this end is closed
        return bool(poll.poll(0))

    @property
    def device_end(self) -> DeviceEnd:
        """The device's end, where it has told of it."""
        return self._device_end()

    def note_end(self, end: Callable[[], DeviceEnd]) -> None:
        """Have errors of this channel say why the device has ended, as `end` finds out once one is raised."""
        self._device_end = end

    def gone(self) -> PeerDied:
        """Return the error of a device's end."""
        return self.device_end.error()

    def _gone(self, why: str) -> PeerDied:
        """Return the error for the end of the connection. Only a device is watched: `why`, if it is no device's end."""
        if self._watch is None or self.fileno() < 0:
            return PeerDied(why)
        end = self.device_end
        is_its_end = end.words or self._watch.has_died  # the kernel marks its death before it ends its sockets
        return end.error() if is_its_end else PeerDied("the connection to the device has ended")

    def send(self, body: Sequence[object], fds: Sequence[int] = ()) -> None:
        """Send a message. Raise PeerDied, and Malformed for a message that is too long."""
        self.send_raw(pack(body), fds)

    def send_raw(self, raw: bytes, fds: Sequence[int] = (), tries: int = _TRIES) -> None:
        """Send bytes that `pack` made. `tries`: while the kernel has no memory for them.

        Raise PeerDied; ResourceExhaustedTransient where too many descriptors are on their way: the kernel counts those
        that no process has received yet for the account that sent them.
        """
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self.socket.sendmsg([raw], [rights], _NO_SIGNAL)
            else:
                self.socket.send(raw, _NO_SIGNAL)
        except BlockingIOError as error:
            raise PeerDied("the other side has not read its messages for 5 s") from error
        except OSError as error:
            if tries <= 1 and error.errno == errno.ETOOMANYREFS:
                raise ResourceExhaustedTransient(
                    "more descriptors of this account are on their way to processes that do not receive them than one "
                    "process may have open (ulimit -n); have those processes read, or end them"
                ) from error
            if tries <= 1 or error.errno not in _SHORTAGES:
                raise self._gone(f"the connection is gone: {error}") from error
            time.sleep(_BREAK)
            self.send_raw(raw, fds, tries - 1)

    def send_at_once(self, raw: bytes) -> bool:
        """Send bytes that `pack` made; return False, and send nothing, while the peer has to read first.

        Raise PeerDied.
        """
        try:
            self.socket.send(raw, _UNLESS_FULL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise self._gone(f"the connection is gone: {error}") from error
            self.send_raw(raw)
        return True

    def await_reader(self, seconds: float) -> bool:
        """Return True if the peer has received all that was sent to it, now or within that time."""
        end, pause = time.monotonic() + seconds, 1e-4
        while self._unread():
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        return True

    def await_message(self, seconds: float) -> bool:
        """Return True once a message has come, or the connection has ended; False after so many seconds."""
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(seconds * 1e3))

    def _unread(self) -> int:
        found = array.array("i", [0])
        try:
            fcntl.ioctl(self.socket, termios.TIOCOUTQ, found)
        except (OSError, ValueError):  # this end is closed
            return 0
        return found[0]

    def receive(self, timeout: float | None = None, tries: int = _TRIES) -> Message:
        """Return the next message. `tries`: while the kernel has no memory for it.

        Raise PeerDied at the end of the connection, Timeout, Malformed, and DescriptorsLost.
        """
        if timeout is not None and not self._readable(timeout):
            raise Timeout(f"no message within {timeout:.3g} s")
        try:
            raw, ancillary, flags, _ = self.socket.recvmsg(
                MAX_BYTES, _ANCILLARY, _CLOEXEC if timeout is None else _NO_WAIT
            )
        except BlockingIOError as error:
            raise Timeout("another reader has taken the message") from error
        except ConnectionResetError as error:  # the other side has closed it, without reading all
            if tries <= 1:
                raise self._gone(f"the connection is gone: {error}") from error
            return self.receive(timeout, 1)  # what it had sent before
        except OSError as error:
            if tries <= 1 or error.errno not in _SHORTAGES:
                raise self._gone(f"the connection is gone: {error}") from error
            time.sleep(_BREAK)
            return self.receive(timeout, tries - 1)
        return self.received(raw, _descriptors(ancillary) if ancillary else [], flags)

    def received(self, raw: bytes, fds: list[int], flags: int) -> Message:
        """Return the message that has arrived like this. Raise PeerDied, Malformed, and DescriptorsLost."""
        message = Message(raw, fds)
        if flags & _TRUNCATED or len(message.fds) > MAX_FDS:
            lost = flags & _TRUNCATED == socket.MSG_CTRUNC and len(message.fds) <= MAX_FDS
            close_apart(message.take_fds())
            if lost:
                raise DescriptorsLost(raw)
            raise Malformed("a message exceeds 64 KiB or 72 descriptors")
        if not raw:
            message.close()
            raise self._gone("the other side closed the connection, or its process is gone")
        return message

    def receive_nothing_else(self) -> Message:
        """Return the message that is there, of a peer that has no descriptors to send. The only reader of this socket.

        Raise Malformed for one with descriptors, which is left unread: they would be closed here. Raise as `receive`.
        """
        with contextlib.suppress(OSError):  # nothing is there, or its end
            _, _, flags, _ = self.socket.recvmsg(0, 0, _NO_WAIT | socket.MSG_PEEK)
            if flags & socket.MSG_CTRUNC:
                raise Malformed("descriptors came with a message that has none")
        return self.receive(0)

    def receive_bytes(self, timeout: float | None = None) -> bytes:
        """Return the next message, without the descriptors that come with it. Raise as `receive`."""
        if timeout is not None:
            message = self.receive(timeout)
            message.close()
            return message.raw
        try:
            raw = self.socket.recv(MAX_BYTES)
        except OSError:
            raw = b""
        return raw or self.receive(0.0).raw  # which tells why there is none

    def call(self, body: Sequence[object], fds: Sequence[int] = (), timeout: float | None = None) -> Message:
        """Send a message and return the answer."""
        self.send(body, fds)
        return self.receive(timeout)

    def _readable(self, timeout: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLIN)
        except ValueError as error:
            raise PeerDied("this end is closed") from error
        return bool(poll.poll(max(0.0, timeout) * 1e3))

    def shutdown(self) -> None:
        """End the waits of other threads on this end."""
        with contextlib.suppress(OSError):  # it is disconnected already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if self._watch:
            self._watch.close()
        self.socket.close()


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_apart(fds: list[int]) -> None:
    """Close descriptors of a peer's in a thread of their own.

    Closing one can take as long as the peer likes, as that of a socket that lingers.
    """
    if not fds:
        return
    try:
        threading.Thread(target=close_all, args=(fds,), name="burst-closing", daemon=True).start()
    except RuntimeError:  # no thread can be started
        close_all(fds)


def _end_with_descriptors(fds: list[int]) -> None:
    """Close descriptors that no handler took; raise Malformed if there are any."""
    count = len(fds)
    close_apart(fds)
    if count:
        raise Malformed(f"{count} descriptors came with a message that has none")


class ChannelLoop:
    """One thread that serves many channels on which messages are rare. The first channel starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # reentrant: garbage collection may discard a channel while we hold it
        self._selector: selectors.BaseSelector | None = None

    def add(self, channel: Channel, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Call `on_message` for each message and `on_end` once, when the peer is gone or broke the protocol."""
        with self._lock:
            if self._selector is None:
                selector = selectors.EpollSelector()
                try:
                    ServingThread(self._run, selector, name=self._name).start()
                except RuntimeError:
                    selector.close()
                    raise
                self._selector = selector
            self._selector.register(channel, selectors.EVENT_READ, (on_message, on_end))

    def discard(self, channel: Channel) -> None:
        """Stop serving a channel; call this before closing it. Does nothing for a channel that is not served."""
        with self._lock:
            self._unregister(channel)

    def forget(self) -> None:
        """Start anew in a forked child, which has no copy of the thread."""
        self._lock = threading.RLock()
        self._selector = None

    def _unregister(self, channel: Channel) -> bool:
        if self._selector is None:
            return False  # a forked child's copy of a channel that the parent serves
        try:
            self._selector.unregister(channel)
        except (KeyError, ValueError):
            return False
        return True

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, Channel)
                self._serve(key.fileobj, *key.data)
                del key  # while this thread waits it must not keep a channel's handlers alive

    def _serve(self, channel: Channel, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        try:
            message = channel.receive(0)
            try:
                on_message(message)
            finally:
                _end_with_descriptors(message.take_fds())
        except Timeout:
            return  # another thread has received the message already
        except (PeerDied, Malformed):
            pass
        except Exception:  # noqa: BLE001 (one bad request must not end a process that serves many)
            _log.exception("%s: our handler failed; its channel is closed", self._name)
        else:
            return
        with self._lock:
            was_there = self._unregister(channel)
        if was_there:
            try:
                on_end()
            except Exception:  # noqa: BLE001 (the others still need this thread)
                _log.exception("%s: the end of a channel failed", self._name)
