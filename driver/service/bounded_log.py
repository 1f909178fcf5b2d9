"""What a device's processes write on stderr, bounded: a client can make a library write megabytes a second.

The engine's stderr, on which libraries write, and its own log records come through a pipe each; the service copies them
to where its own stderr goes. Each source has an allowance of bytes, which is refilled slowly; what exceeds it is
counted, and the count is written instead. A pipe that is full loses what is written to it: no library waits. A log that
is a file is cut to its last part when it has grown too long.

Messages of a process that dies are in its pipe, and are copied before the service ends.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from fmq.printable import LAYOUT, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALLOWANCE, REFILL = 64 << 10, 1 << 10  # bytes, and bytes a second, of each source
MOST, KEPT = 1 << 20, 256 << 10  # bytes: a longer file is cut to this
FORMAT = "%(asctime)s %(process)d %(name)s: %(message)s"
_STDOUT, _STDERR = 1, 2
_CHUNK = 64 << 10
_LONGEST = 8 << 10  # bytes of a line; a longer one is several
_LAST = 64  # chunks of what is left at the end
_TELL = 5.0  # seconds until what was left out is told, if nothing else is written


class Allowance:
    """Bytes that one source may write, and a count of what it may not. One thread at a time."""

    def __init__(self, source: str) -> None:
        self._source, self._left, self._at = source, float(ALLOWANCE), time.monotonic()
        self.lines = self._bytes = 0  #: left out since the last `told`

    def takes(self, nbytes: int) -> bool:
        """Return True if a line of this length may be written; else count it."""
        now = time.monotonic()
        self._left, self._at = min(ALLOWANCE, self._left + (now - self._at) * REFILL), now
        if self._left < nbytes:
            self.lines, self._bytes = self.lines + 1, self._bytes + nbytes
            return False
        self._left -= nbytes
        return True

    def told(self) -> bytes:
        """Return what was left out since the last time, as a line; b"" if nothing was."""
        if not self.lines:
            return b""
        words = f"({self.lines} lines, {self._bytes} bytes, of {self._source} were left out)\n"
        self.lines = self._bytes = 0
        return words.encode()


class PrintableFormatter(logging.Formatter):
    """A formatter for records that may quote clients: a message is one line, and moves nothing on a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (its name in logging)
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), LAYOUT)


class BoundedHandler(logging.Handler):
    """Log records of this process, within an allowance. What was left out is told with the next record."""

    def __init__(self, write: Callable[[bytes], object], source: str, layout: str = FORMAT) -> None:
        super().__init__()
        self.setFormatter(PrintableFormatter(layout))
        self._write, self._allowance = write, Allowance(source)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
            if self._allowance.takes(len(line)):
                self._write(self._allowance.told() + line)
        except Exception:  # noqa: BLE001 (logging must not fail)
            self.handleError(record)


class LogFile:
    """Where the stderr of a process goes. Any thread."""

    def __init__(self, own: Path, fd: int = _STDERR) -> None:
        """`own`: the device's own log. It is cut when it has grown too long, and no other file is."""
        self._fd = fd
        try:
            self._is_own = os.path.samestat(os.fstat(self._fd), own.stat())
        except OSError:
            self._is_own = False

    def write(self, words: bytes) -> None:
        """Never raises, and loses what cannot be written: its reader is gone, or the disk is full."""
        with suppress(OSError):
            os.write(self._fd, words)
            if self._is_own and os.fstat(self._fd).st_size > MOST:
                self._cut()

    def _cut(self) -> None:
        with open(f"/proc/self/fd/{self._fd}", "rb") as file:
            file.seek(-KEPT, os.SEEK_END)
            tail = file.read()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.write(self._fd, b"(what was before was cut off)\n" + tail.partition(b"\n")[2])


class LogPipe:
    """A pipe from which lines are copied, within an allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self.readable, self.writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.allowance = allowance
        self._rest, self.is_open = b"", True

    def lines(self) -> Iterator[bytes]:
        """Yield what is there, up to a chunk, in whole lines; the last one at the end even if it is none."""
        try:
            read = os.read(self.readable, _CHUNK)
        except BlockingIOError:
            return
        self.is_open = bool(read)
        *whole, self._rest = (self._rest + read).split(b"\n")
        yield from (line + b"\n" for line in whole)
        if self._rest and (not read or len(self._rest) > _LONGEST):
            yield self._rest + b"\n"
            self._rest = b""

    def copy_to(self, log: LogFile) -> bool:
        """Copy what is there; return True if there was anything."""
        lines = list(self.lines())
        if admitted := [line for line in lines if self.allowance.takes(len(line))]:
            log.write(_printable(b"".join(admitted)))
        if not self.is_open:
            log.write(self.allowance.told())
        return bool(lines)

    def redirect(self) -> None:
        """Have all that this process writes go through it from now on."""
        for fd in (_STDOUT, _STDERR):
            os.dup2(self.writable, fd)

    def finish(self, log: LogFile) -> None:
        """Copy what is left, when the process that wrote has ended, and close the pipe."""
        for _ in range(_LAST):
            if not self.copy_to(log):
                break
        log.write(self.allowance.told())
        self.is_open = False
        os.close(self.readable)


def _printable(raw: bytes) -> bytes:
    """Clean what libraries write: they quote names in model files."""
    return printable(raw.decode(errors="replace"), LAYOUT).encode()


class EngineLog:
    """The engine's stderr and log records, copied by a thread of the service."""

    def __init__(self, log: LogFile) -> None:
        """Make its pipes, before the engine is forked."""
        self._log, self._told_at = log, time.monotonic()
        self._libraries, self._records = (LogPipe(Allowance(f"the engine's {name}")) for name in ("libraries", "log"))
        self._open = {source.readable: source for source in (self._libraries, self._records)}
        self._end, self._thread = os.eventfd(0, os.EFD_CLOEXEC), threading.Thread(target=self._copy, daemon=True)

    def redirect(self) -> None:
        """Have all that the engine writes go through the pipes from now on."""
        self._libraries.redirect()
        for unused in (self._libraries.writable, self._end, *self._open):
            os.close(unused)
        records = self._records.writable
        logging.getLogger().handlers[:] = [BoundedHandler(lambda line: os.write(records, line), "the engine's log")]

    def begin(self) -> None:
        """Start the thread, in the service, after the fork. Until then, a pipe keeps 64 KiB."""
        self._thread.name = "log"
        self._thread.start()

    def close_writable(self) -> None:
        """Close the ends that are written to, in the service, after the fork."""
        for source in self._open.values():
            os.close(source.writable)

    def finish(self) -> None:
        """Copy what is left, when the engine has ended."""
        if self._thread.ident is not None:
            os.eventfd_write(self._end, 1)
            self._thread.join(_TELL)
        for source in self._open.values():
            for _ in range(_LAST):
                if not source.copy_to(self._log):
                    break
            self._log.write(source.allowance.told())

    def _copy(self) -> None:
        poll = select.poll()
        for fd in (self._end, *self._open):
            poll.register(fd, select.POLLIN)
        while self._open:
            is_pending = any(source.allowance.lines for source in self._open.values())
            ready = [fd for fd, _ in poll.poll(_TELL * 1e3 if is_pending else None)]
            if self._end in ready:
                return
            for source in [self._open[fd] for fd in ready]:
                source.copy_to(self._log)
                if not source.is_open:
                    poll.unregister(source.readable)
                    del self._open[source.readable]
            if time.monotonic() - self._told_at > _TELL:
                for source in self._open.values():
                    self._log.write(source.allowance.told())
                self._told_at = time.monotonic()
