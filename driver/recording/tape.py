"""Writes a recording in the background: requests are copied, and a thread writes them.

The amount of unwritten data is bounded. If the disk is too slow, requests are left out and counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from driver.errors import DriverError
from driver.protocol.model_codec import encode
from driver.recording.frames import MAGIC, VERSION, head, packed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from driver.client.remote_executor import RemoteExecutor

_log = logging.getLogger(__name__)
MOST_WAITING = 256 * 2**20
"""Bytes that may wait to be written."""

_OVERHEAD = 512  # bytes that a waiting frame takes beside its own
_EVERY = 0.02  # seconds between looks at what there is to write
_WORK, _PAUSE = 100e-6, 1e-3  # seconds: a busy Python thread keeps others from running for 5 ms
_AT_ONCE, _BYTES_AT_ONCE = 64, 2**20  # frames, and bytes but for the last one, in one call
UNANSWERED = -1
"""Stands for the status of a request whose result is unknown."""


class Tape:
    """One file. Any thread may add to it."""

    def __init__(self, path: Path, most_bytes: int, most_waiting: int = MOST_WAITING) -> None:
        """Create a file that only its owner may read, because it may hold camera images. Raise DriverError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise DriverError(f"{path}: the file exists; remove it, or pass another name") from None
        except OSError as error:
            raise DriverError(f"{path}: cannot create the recording ({error.strerror}); pass another name") from error
        self.path, self.pid = path, os.getpid()
        self.runs, self.left_out = 0, Counter[str]()  #: requests that are there, and those that are not, by reason
        self._most_bytes, self._most_waiting = most_bytes, most_waiting
        self._frames: deque[tuple[bytes, Sequence[bytes]]] = deque()
        self._waiting = self._written = self._streams = 0
        self._lock, self._wake, self._is_closed = threading.Lock(), threading.Event(), False
        self._models: dict[int, tuple[int, RemoteExecutor]] = {}
        self._describing = threading.Lock()
        self._write([MAGIC])
        self._put(["begin", VERSION, time.time(), time.monotonic_ns(), self.pid, " ".join(sys.argv)[:1000]])
        self._thread = threading.Thread(target=self._run, name="burst-recording", daemon=True)
        self._thread.start()

    def stream(self, prepared: RemoteExecutor, path: str, depth: int, spin: object) -> int:
        """Return the number of a new sequence of requests: those of a burst, or of a thread on the plain path."""
        with self._describing:
            model = self._model(prepared)
            self._streams += 1
            self._put(["stream", self._streams, model, path, depth, spin])
            return self._streams

    def _model(self, prepared: RemoteExecutor) -> int:
        """Return its number. It is written as it goes to the device."""
        known = self._models.get(id(prepared))
        if known:
            return known[0]
        number = len(self._models) + 1
        self._models[id(prepared)] = number, prepared  # which keeps the address its own
        model = encode(prepared.model, most_handles=0)
        with open(model.fd, "rb", closefd=False) as file:
            file.seek(0)
            options = prepared.options
            words = ["model", number, prepared.device.address, options.preference, options.priority, model.where]
            self._put(words, [file.read()])
        return number

    def run(self, words: list[Any], bulk: Sequence[bytes]) -> None:
        """Write one request that is over: what `driver.recording.recorder` says of it, and its inputs and outputs."""
        try:
            raw = packed(["run", *words])
        except (ValueError, TypeError, OverflowError):
            self.leave_out("it cannot be described")
            return
        nbytes = len(raw) + sum(map(len, bulk)) + _OVERHEAD
        with self._lock:
            if self._is_closed:
                return
            if self._written + self._waiting + nbytes > self._most_bytes:
                self.left_out["the file is full"] += 1
            elif self._waiting + nbytes > self._most_waiting:
                self.left_out["the disk is too slow"] += 1
            else:
                self._waiting += nbytes
                self.runs += 1
                self._frames.append((raw, bulk))
                if self._waiting > self._most_waiting // 2:
                    self._wake.set()

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count requests that are not recorded."""
        with self._lock:
            self.left_out[reason] += count

    def close(self) -> None:
        """Everything is written, and how much was left out. Harmless when done twice, and in a forked child."""
        with self._lock:
            if self._is_closed or os.getpid() != self.pid:
                return
            self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._frames.append((packed(["end", self.runs, dict(self.left_out)]), ()))
        self._write_some()
        os.close(self._fd)

    def _put(self, words: list[Any], bulk: Sequence[bytes] = ()) -> None:
        """Write what is always taken: without it, nothing that follows could be read."""
        raw = packed(words)
        with self._lock:
            self._waiting += len(raw) + sum(map(len, bulk)) + _OVERHEAD
            self._frames.append((raw, bulk))

    def _run(self) -> None:
        while not self._is_closed or self._frames:
            if not self._frames:
                self._wake.wait(_EVERY)
                self._wake.clear()
            begin = time.perf_counter()
            while self._frames and (time.perf_counter() - begin < _WORK or self._is_urgent()):
                self._write_some()
            if self._frames:
                time.sleep(_PAUSE)

    def _is_urgent(self) -> bool:
        return self._is_closed or self._waiting > self._most_waiting // 2

    def _write_some(self) -> None:
        parts: list[bytes] = []
        count = nbytes = 0
        while self._frames and count < _AT_ONCE and nbytes < _BYTES_AT_ONCE:
            raw, bulk = self._frames.popleft()
            parts += (head(raw, bulk), raw, *bulk)
            nbytes += len(raw) + sum(map(len, bulk)) + _OVERHEAD
            count += 1
        try:
            self._write(parts)
        except OSError as error:
            _log.warning("%s: recording stopped: %s", self.path, error)
            self._most_bytes = 0
        with self._lock:
            self._waiting -= nbytes

    def _write(self, parts: list[bytes]) -> None:
        """Write with as few calls as possible: a killed process leaves whole frames and part of the last one."""
        left = [part for part in parts if part]
        while left:
            done = os.writev(self._fd, left[: os.sysconf("SC_IOV_MAX")])
            self._written += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]
