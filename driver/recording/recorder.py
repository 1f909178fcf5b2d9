"""Whether this process is recorded: by `record`, or because BURST_RECORD names a file.

It is asked once for each model that is prepared, and nowhere else: who is not recorded pays nothing.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver.client.device import RemoteDevice
from driver.client.prepared_model import RemotePreparedModel
from driver.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.recording.tape import Tape

VARIABLE, VARIABLE_MB = "BURST_RECORD", "BURST_RECORD_MB"
MOST_MB = 4096
"""Megabytes of a file, unless somebody says otherwise."""

_MB = 10**6
_lock = threading.Lock()
_tapes: dict[str, Tape] = {}  # "explicit", and "environment"


def prepared_model(*arguments: Any) -> RemotePreparedModel:
    """As RemotePreparedModel(…), whose requests are recorded if anybody wants that. Raises DriverError."""
    tape = _tape()
    if tape is None:
        return RemotePreparedModel(*arguments)
    from driver.recording.taped import TapedPreparedModel

    return TapedPreparedModel(tape, *arguments)


@contextmanager
def record(path: str | os.PathLike[str], most_bytes: int = MOST_MB * _MB) -> Iterator[Tape]:
    """Requests to devices, of models that this process prepares meanwhile, go into a new file. Raises DriverError."""
    from driver.recording.tape import Tape

    tape = Tape(Path(path), most_bytes)
    with _lock:
        before = _tapes.get("explicit")
        _tapes["explicit"] = tape
    try:
        yield tape
    finally:
        with _lock:
            if before is None:
                del _tapes["explicit"]
            else:
                _tapes["explicit"] = before
        tape.close()


def _tape() -> Tape | None:
    pid = os.getpid()
    found = _tapes.get("explicit")
    if found and found.pid == pid:
        return found
    if not (name := os.environ.get(VARIABLE)):
        return None
    with _lock:
        found = _tapes.get("environment")
        if found is None or found.pid != pid:
            found = _tapes["environment"] = _of_environment(Path(name))
            atexit.register(found.close)
    return found


def _of_environment(path: Path) -> Tape:
    """The file that was named for the first process that prepares a model; PATH.PID for others."""
    from driver.recording.tape import Tape

    most = os.environ.get(VARIABLE_MB) or str(MOST_MB)
    if not (most.isdecimal() and 0 < int(most) < 10**9):
        raise DriverError(f"{VARIABLE_MB}={most}: a whole number of megabytes")
    if path.exists():
        path = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        return Tape(path, int(most) * _MB)
    except DriverError as error:
        raise DriverError(f"{VARIABLE}: {error}") from error


RemoteDevice.new_prepared_model = staticmethod(prepared_model)
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))
