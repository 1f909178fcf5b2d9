"""What of a program ran where, and why: counts of this process, written at its end.

This file imports the standard library alone: the hook loads it before anything of Burst is needed.

  BURST_EXEC_REPORT names the file. Each process that made a session adds itself to the file's list, under a lock, and
  prints its own table on standard error, unless BURST_EXEC_TABLE is 0.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import stat
import sys
import threading
from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

REPORT = "BURST_EXEC_REPORT"
"""The variable with the path of the report."""
TABLE = "BURST_EXEC_TABLE"
"""The variable that is 0 where no process is to print its table."""

_WIDEST = 60


class Tally:
    """Counts of one process: sessions and runs, in a device and in it. Any thread, and handlers of signals."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._told: set[str] = set()
        self._pid = 0
        self.forget()

    def forget(self) -> None:
        """Begin at zero: in a forked child."""
        self._models: dict[str, Counter[str]] = {}
        self._reasons: Counter[tuple[str, str, str]] = Counter()
        self._devices: dict[str, str] = {}
        self._lock = threading.RLock()

    def count(self, model: str, what: str) -> None:
        """Count one more: "sessions", "device_runs" or "process_runs"."""
        with self._lock:
            self._begin()
            counts = self._models.get(model)  # a Counter takes as long to make as all the rest
            if counts is None:
                counts = self._models[model] = Counter()
            counts[what] += 1

    def place(self, model: str, device: str) -> None:
        """Note the device in which runs of a model are."""
        with self._lock:
            self._devices[model] = device

    def refuse(self, model: str, reason: str, remedy: str = "") -> None:
        """Count that something ran in the process, and why."""
        with self._lock:
            self._begin()
            self._reasons[model, reason, remedy] += 1

    def warn(self, words: str) -> None:
        """Print one line on standard error, once for each line and process."""
        with self._lock:
            is_new = words not in self._told
            self._told.add(words)
        if is_new and sys.stderr is not None:
            print(f"burst exec: {words}", file=sys.stderr)

    def _begin(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        if os.environ.get(REPORT):
            atexit.register(self.write)
            if "multiprocessing" in sys.modules:  # its children end without what atexit has
                from multiprocessing.util import Finalize

                Finalize(None, self.write, exitpriority=0)

    def found(self) -> dict[str, object]:
        """Return what was counted, as it is written."""
        with self._lock:
            rows = [
                {"model": model, "reason": reason, "remedy": remedy, "times": times}
                for (model, reason, remedy), times in sorted(self._reasons.copy().items())
            ]
            models = [
                {"model": model, **({"device": self._devices[model]} if model in self._devices else {}), **counts}
                for model, counts in sorted(self._models.copy().items())
            ]
        return {"pid": os.getpid(), "command": list(sys.orig_argv), "models": models, "in_process": rows}

    def write(self) -> None:
        """Add this process to the report, and print its table; once."""
        path = os.environ.get(REPORT)
        if self._pid != os.getpid() or not path:
            return
        self._pid = -1
        found = self.found()
        try:
            _add(path, found)
        except OSError as error:
            self.warn(f"--report {path}: {error.strerror}")
        if sys.stderr is not None and os.environ.get(TABLE) != "0":
            print(table(found), file=sys.stderr)


def table(found: dict[str, object]) -> str:
    """Return what was counted as lines for people."""
    lines = [f"burst exec: process {found['pid']}"]
    for row in found["models"]:  # type: ignore[attr-defined]
        counts = ", ".join(f"{row.get(what, 0)} {word}" for what, word in _WORDS.items())
        lines.append(f"  {row['model']:<{_WIDEST}.{_WIDEST}}  {counts}")
    for row in found["in_process"]:  # type: ignore[attr-defined]
        remedy = f"; {row['remedy']}" if row["remedy"] else ""
        lines.append(f"  in this process, {row['times']} times: {row['model']}: {row['reason']}{remedy}")
    return "\n".join(lines)


_WORDS = {"sessions": "sessions", "device_runs": "runs in a device", "process_runs": "runs in this process"}


def _add(path: str, found: dict[str, object]) -> None:
    """Put a new file in the place of the report: one that ends meanwhile leaves what others have written."""
    path = os.path.realpath(path)
    with _locked(path) as file:
        try:
            whole = json.loads(file.read() if file.readable() else "")
            whole["processes"].append(found)
        except (ValueError, KeyError, TypeError, AttributeError):  # it was emptied, or is another's
            whole = {"processes": [found]}
        text, mode = json.dumps(whole, indent=1), os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):  # a terminal, /dev/null
            file.write(text)
            return
        new = f"{path}.new"  # of whoever holds the lock
        with open(new, "w", encoding="utf-8") as written:
            os.fchmod(written.fileno(), stat.S_IMODE(mode))
            written.write(text)
        os.replace(new, path)


def _locked(path: str) -> TextIO:
    """Return the file, locked, once it is the one of that path: whoever held the lock has put another one there."""
    while True:
        is_special = os.path.exists(path) and not os.path.isfile(path)  # such as cannot be read, or has no places
        file = open(path, "w" if is_special else "a+", encoding="utf-8")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                if not is_special:
                    file.seek(0)
                return file
        except FileNotFoundError:
            pass
        file.close()


tally = Tally()
os.register_at_fork(after_in_child=tally.forget)
