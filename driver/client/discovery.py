"""Finding a device's service, or starting it: once, however many clients come at the same moment.

A service listens on a Unix socket in a directory of the user's own. A client that finds no service there takes the lock
beside it, looks again, binds the socket *itself* and hands it to a new service: from then on all clients' connections
wait in its backlog, and there is no moment at which two services could start or a half-started one be found. A service
without clients takes the same lock before it closes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from burst import BurstError, PeerDied, ResourceExhaustedPersistent
from burst.channel import Channel, refuse_descriptors
from burst.exhaustion import exhausted
from driver import interpreter
from driver.client import launch, served_sockets, user_manager
from driver.client.other_process import OtherProcess
from driver.config import home, listed_home
from driver.devices import check_usable
from driver.devices.library.description import absolute, is_library
from driver.errors import DeviceFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_log = logging.getLogger(__name__)
_APART = (
    "device %r is started for this program and those with the same limits alone, because a device would keep what only "
    "privilege can reset: %s, and systemd's manager of the account cannot start it: %s; to share one device, start it "
    "from a program without these limits, or with `burst serve`"
)
PATIENCE = 30.0
"""Seconds that a process may hold the lock: a start under it takes tens of milliseconds."""

_STOPPED = 1.0  # the same, for a process that is stopped
_LAUNCH = 15.0  # seconds in which a launcher, which sets limits and forks, has ended
_FEWEST = 24  # descriptors with which a device serves one client
_FULL, _REFUSED = {errno.ENOSPC, errno.EDQUOT}, {errno.EPERM, errno.ENOSYS}
_ELSEWHERE = "set BURST_RUNTIME_DIR to a directory of your own in which files and sockets can be made"
_LOOK = 0.01  # seconds
TEMPORARY, STAYING = Path("/tmp"), Path("/var/tmp")
_LOG_LINES, _LOG_BYTES = 6, 2000  # of a log in an error message


@contextlib.contextmanager
def as_ours() -> Iterator[None]:
    """Raise errors of the system on the way to a device as ours: what has run out, or which file was in the way."""
    try:
        yield
    except BurstError:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number not in _FULL and (found := exhausted(error, "this process")):
            raise found from error
        if not isinstance(error, OSError):
            raise
        where, remedy = error.filename or "the runtime directory", _ELSEWHERE
        if number in _REFUSED and not error.filename:
            where, remedy = "a system call is refused", "`burst doctor` tries those that are needed"
        raise _of_all(f"no device can be reached or started: {where}: {error.strerror or error}; {remedy}") from error


def _of_all(words: str) -> DeviceFailed:
    """Return the error of a runtime directory."""
    error = DeviceFailed(words)
    error.is_of_all = True
    return error


def runtime_dir() -> Path:
    """Return the directory of sockets, locks and logs: mode 0700, this user's. Raise DeviceFailed.

    BURST_RUNTIME_DIR overrides it. Another account may have made the usual directory in /tmp first; then there are
    others. One of these that exists is used from then on, whatever becomes of the usual one, so that all processes of
    the user find the same.
    """
    if _own:
        places = [_own.folder]
    elif given := os.environ.get("BURST_RUNTIME_DIR"):
        places = [Path(given).absolute()]
    else:
        spare = list(_spare_places())
        places = [*_session_place(), *filter(os.path.isdir, spare), _common_place(), *spare]
    for path in places:
        with contextlib.suppress(OSError):  # it exists, or cannot be made: `taken` says so
            path.mkdir(mode=0o700, parents=True)
        if not taken(path):
            return _private(path)
    reasons = "; ".join(dict.fromkeys(map(taken, places)))
    raise _of_all(f"{reasons}; remove it or change its mode, or set BURST_RUNTIME_DIR to a directory of your own")


def files_there(pattern: str) -> list[Path]:
    """Return the files of the runtime directory that match; none where it cannot be used."""
    try:
        return sorted(runtime_dir().glob(pattern))
    except (DeviceFailed, OSError):
        return []


class OwnDevices(NamedTuple):
    """The devices that a process starts for itself alone. variables: of their environment, beside the usual ones."""

    folder: Path
    variables: Mapping[str, str]


_own: OwnDevices | None = None


@contextlib.contextmanager
def own_devices(devices: OwnDevices) -> Iterator[None]:
    """Have this process find and start these devices alone, within the block."""
    global _own  # noqa: PLW0603 (a process finds devices in one way at a time)
    _own = devices
    try:
        yield
    finally:
        _own = None


_ask: Callable[[str], Channel] | None = None


def reach_by(ask: Callable[[str], Channel]) -> None:
    """Have another process find and start the devices of this one, which may not, from now on."""
    global _ask  # noqa: PLW0603 (as above)
    _ask = ask


_begun: dict[tuple[int, str], Channel] = {}  # by thread


def begin(name: str) -> None:
    """Start a device of this account's own, or find it, and keep the connection for this thread's next `reach`.

    Raise what that does.
    """
    if not (_ask or served_sockets.is_path(name)):
        with contextlib.suppress(PeerDied):  # `reach` tries again
            _begun[threading.get_ident(), name] = connect(name)


def reach(name: str) -> Channel:
    """Return a connection to a device: one that is served at the path `name`, or one of this account's own.

    Raise what `connect` does, here and in `served_sockets`.
    """
    if _ask:
        return _ask(name)
    if begun := _begun.pop((threading.get_ident(), name), None):
        return begun
    return served_sockets.connect(name) if served_sockets.is_path(name) else connect(name)


def _session_place() -> Iterator[Path]:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base) and Path(base).stat().st_uid == os.getuid():  # `su` keeps another user's variable
        yield Path(base, "burst").absolute()


def _common_place() -> Path:
    """Return the directory of processes without XDG_RUNTIME_DIR: any account may make it, as it is below /tmp."""
    return TEMPORARY / f"burst-{os.getuid()}"


def _spare_places() -> Iterator[Path]:
    folder = listed_home() or home()
    yield folder / ".cache/burst" / f"run-{os.uname().nodename}"  # machines may share homes, but no sockets
    yield STAYING / f"burst-{os.getuid()}"


def why_elsewhere(path: Path) -> str:
    """Return why `runtime_dir` chose a spare place; "" if it chose a usual one."""
    if os.environ.get("BURST_RUNTIME_DIR") or path not in _spare_places():
        return ""
    return taken(_common_place()) if os.path.lexists(_common_place()) else f"{_common_place()} was taken once"


def taken(path: Path) -> str:
    """Return why the directory cannot be used, as far as others could have caused that; "" if it can."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} must be a directory of mode 0700 that belongs to you, and is none"
    if status.st_uid != os.getuid():
        return f"{path} must be a directory of mode 0700 that belongs to you, and belongs to uid {status.st_uid}"
    return ""


def _private(path: Path) -> Path:
    if path.lstat().st_mode & 0o077:
        remedy = "remove it or change its mode, or set BURST_RUNTIME_DIR to a directory of your own"
        raise _of_all(f"{path} must be a directory of mode 0700 that belongs to you; {remedy}")
    return path


def stem_of(name: str) -> str:
    """Return the stem of a device's file names: its name or, of a library, its last part and a digest of its path."""
    last = short_name(name)
    if last != name:
        last += "-" + hashlib.sha256(os.fsencode(absolute(name))).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", last)


def short_name(name: str) -> str:
    """Return the last part of a library's path; other names unchanged."""
    return os.path.basename(name) if is_library(name) else name


class Place:
    """The files of one device name."""

    def __init__(
        self, directory: Path, name: str, remedy: str = "set BURST_RUNTIME_DIR to a shorter one", apart: str = ""
    ) -> None:
        """Name the files. `remedy`: against a path that is too long. `apart`: which of several devices of this name, if
        not the one for all processes. Raise DeviceFailed.
        """
        self.apart, stem = apart, stem_of(name) + (f".{apart}" if apart else "")
        self.socket, self.lock, self.log = (directory / f"{stem}.{kind}" for kind in ("sock", "lock", "log"))
        if len(os.fsencode(self.socket)) > 107:
            raise _of_all(f"{self.socket}: a socket's path has at most 107 bytes; {remedy}")

    @contextlib.contextmanager
    def locked(self, patience: float = PATIENCE) -> Iterator[bool]:
        """Yield True if we have the lock after so many seconds; sooner if its holder is stopped (Ctrl-Z)."""
        with open(self.lock, "ab") as file:
            is_ours = self._acquired(file, patience)
            try:
                yield is_ours
            finally:
                if is_ours:  # at once, even if the process has forked meanwhile: the child's copy would keep the lock
                    fcntl.flock(file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def locked_to_leave(self, patience: float = PATIENCE) -> Iterator[bool]:
        """Do what `locked` does, for a service that ends. Yield True where its folder is gone: nobody can find it."""
        with contextlib.ExitStack() as stack:
            try:
                is_ours = stack.enter_context(self.locked(patience))
            except FileNotFoundError:
                is_ours = True
            yield is_ours

    def _acquired(self, file: BinaryIO, patience: float) -> bool:
        begin = time.monotonic()
        ask_at = begin + _STOPPED
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                now = time.monotonic()
                if now >= begin + patience:
                    return False
                if now >= ask_at:
                    if (holder := self.holder()) and holder.is_stopped:
                        return False
                    ask_at = now + _STOPPED
                time.sleep(_LOOK)  # flock has no timeout
            else:
                return True

    def holder(self) -> OtherProcess | None:
        """Return the process that holds the lock; None if there is none, or the kernel does not say."""
        try:
            lock = self.lock.stat()
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return None
        for words in map(str.split, lines):  # "1: FLOCK ADVISORY WRITE 123 fe:00:456 0 EOF"; waiters have "->"
            if words[1] == "FLOCK" and words[3] == "WRITE" and words[5].endswith(f":{lock.st_ino}"):
                with contextlib.suppress(OSError, ValueError):
                    if any(os.path.samestat(lock, fd.stat()) for fd in Path(f"/proc/{int(words[4])}/fd").iterdir()):
                        return OtherProcess.of(int(words[4]))
        return None

    def held(self) -> DeviceFailed:
        """Return the error for a caller that did not get the lock: who holds it, and the remedy."""
        if (holder := self.holder()) is None:
            return DeviceFailed(f"{self.lock}: another process holds it for long; `fuser -v {self.lock}` names it")
        process = f"{self.lock}: process {holder.pid} ({holder.command}) holds it"
        if holder.is_stopped:
            remedy = f"continue it with `kill -CONT {holder.pid}` (or `fg` in its shell), or end it"
            return DeviceFailed(f"{process} and is stopped; {remedy}")
        return DeviceFailed(f"{process} for longer than {PATIENCE:g} s; wait for it, or end it")

    def end_of_log(self) -> str:
        """Return where the log lies, and its last lines, indented: for the message of a device that did not start."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        shown = "".join(f"\n    {line}" for line in lines)
        return f"its log is {self.log}" + (
            f", and ends with{shown}" if shown else f", and is empty; {interpreter.executable()} ran it"
        )

    def leave(self, listener: socket.socket, *, is_locked: bool = True, named: os.stat_result | None = None) -> None:
        """Stop listening; under the lock, also take the socket's name away unless it is a successor's by now.

        `named`: what had that name when this process began, for one that may not connect to it.
        """
        listener.close()
        if not is_locked:
            return  # what is left has no listener: the next service takes it away
        with contextlib.suppress(FileNotFoundError):
            # No other file had its number until the listener was closed.
            if os.path.samestat(named, os.stat(self.socket)) if named else not self._is_heard():
                self.socket.unlink()

    def _is_heard(self) -> bool:
        """Return True if a process listens to the socket that is there. Raise FileNotFoundError."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(str(self.socket))
        except ConnectionRefusedError:
            return False
        return True


def connect(name: str) -> Channel:
    """Return a connection to the device's service, started when there is none.

    Raise DeviceNotFound, DeviceFailed, and PeerDied when the new service is gone already.
    """
    place = Place(runtime_dir(), name)
    if found := find(place):
        return found
    check_usable(name)  # says what is not installed here, and not in a log
    why = ""
    if limits := launch.kept():
        own = apart(name, limits)
        if found := find(own):
            return found
        found, why = _outside(name, place)
        if found:
            return found
        if (most := limits.get("RLIMIT_NOFILE", _FEWEST)) < _FEWEST:
            words = f"a device needs {_FEWEST} descriptors or more, and would keep this process's limit of {most}"
            raise ResourceExhaustedPersistent(
                f"{words}; raise it (ulimit -Hn), or start the device from another program"
            )
        place = own
    with place.locked() as is_ours:
        if found := find(place):
            return found
        if not is_ours:
            raise place.held()
        if limits:
            _log.warning(_APART, name, launch.told(limits), why)
        place.log.unlink(missing_ok=True)
        with listen(place) as listener:
            _start(name, place, listener)
        found = find(place)
    if found is None:
        raise PeerDied(f"device {name!r} ended while it started")
    return found


class SecondService(NamedTuple):
    """A second service of a device, beside the first one. `name` and `place`: of its socket until it takes the device's
    name; the same where it has that.
    """

    channel: Channel
    name: Path
    place: Place

    def take_name(self) -> None:
        """Give it the device's name: clients find one service or the other, and never none. Raise DeviceFailed."""
        with self.place.locked() as is_ours:
            if not is_ours:
                raise self.place.held()
            self.name.rename(self.place.socket)

    def forget(self) -> None:
        """Take its own name away: it ends with its last client."""
        if self.name != self.place.socket:
            self.name.unlink(missing_ok=True)


@as_ours()
def start_beside(name: str, pid: int) -> SecondService:
    """Start a second service of a device, or find it: the first one has that pid. Raise as `connect` does."""
    check_usable(name)
    place, spare = (Place(runtime_dir(), name, apart=apart) for apart in ("", "next"))
    with place.locked() as is_ours:
        if not is_ours:
            raise place.held()
        if found := find(place):
            if found.peer_pid != pid:
                return SecondService(found, place.socket, place)
            found.close()
        try:
            with listen(spare) as listener:
                _start(name, place, listener, "second")
            if found := find(spare):
                return SecondService(found, spare.socket, place)
        except BaseException:
            spare.socket.unlink(missing_ok=True)
            raise
    spare.socket.unlink(missing_ok=True)
    raise DeviceFailed(f"device {name!r} ended while it started; {place.end_of_log()}")


def starts(name: str) -> bool:
    """Return True if this process starts that device for all of its account: it may, and passes no limits on."""
    return not (served_sockets.is_path(name) or _ask or launch.kept())


def _outside(name: str, place: Place) -> tuple[Channel | None, str]:
    """Return a connection to a device that systemd's manager of the account starts, or why there is none.

    Raise DeviceFailed.
    """
    if reason := user_manager.absence():
        return None, reason
    with place.locked() as is_ours:
        if found := find(place):
            return found, ""
        if not is_ours:
            raise place.held()
        place.log.unlink(missing_ok=True)
        reason = user_manager.start(_command(name, place, str(place.socket)), _variables(place))
        found = None if reason else find(place)
        return found, reason or f"the device ended while it started; {place.end_of_log()}"


def apart(name: str, limits: dict[str, int]) -> Place:
    """Return the place of the device of processes that pass these limits on to what they start."""
    return Place(runtime_dir(), name, apart=f"limited-{launch.name_of(limits)}")


@as_ours()
def running(name: str) -> Channel | None:
    """Return a connection to the device that this process would use, or None; never start it. Raise DeviceFailed."""
    return find(Place(runtime_dir(), name)) or ((limits := launch.kept()) and find(apart(name, limits))) or None


def end_of_log(name: str) -> str:
    """Return `Place.end_of_log` of the device that this process would start."""
    limits = launch.kept()
    return (apart(name, limits) if limits else Place(runtime_dir(), name)).end_of_log()


def find(place: Place) -> Channel | None:
    """Return a connection to the service that listens there, or None. Raise DeviceFailed if it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(place.socket))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    channel = Channel(sock)
    if channel.peer_uid != os.getuid():
        channel.close()
        raise DeviceFailed(f"{place.socket} belongs to another user; remove it")
    return channel


def listen(place: Place) -> socket.socket:
    """Return a listening socket, under the lock: whatever lies there now has no listener."""
    with contextlib.suppress(FileNotFoundError):
        place.socket.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:  # perhaps as a standard stream that was closed
        listener = socket.socket(fileno=fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3))
    refuse_descriptors(listener)  # of whom it accepts, the service takes some once it has admitted the client
    listener.bind(str(place.socket))
    listener.listen(launch.BACKLOG)
    return listener


def environment(directory: Path) -> dict[str, str]:
    """Return all that a device's processes inherit: the first client must not shape what the others get."""
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home()),
        "LANG": "C.UTF-8",
        "BURST_RUNTIME_DIR": str(directory),
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }


def _variables(place: Place) -> dict[str, str]:
    return {**environment(place.socket.parent), **(_own.variables if _own else {})}


# A frozen application has that file in its archive: the Python that it names has one of its own, whose packages are not
# imported before it has run.
_LAUNCH_OF_PYTHON = """import importlib.util, os, runpy
[folder] = importlib.util.find_spec("driver").submodule_search_locations
runpy.run_path(os.path.join(folder, "client", "launch.py"), run_name="__main__")"""


def _command(name: str, place: Place, listener: str) -> list[str]:
    """Return the launcher's command. `listener`: the listening socket's descriptor, or the path at which to listen.

    Raise DeviceFailed where no Python is known that could run it, or this program was started as one.
    """
    if launch.__file__ in sys.argv[1:]:
        raise DeviceFailed(f"this program was started as the Python of a device, and is none; {interpreter.REMEDY}")
    python = interpreter.executable()
    script = ["-c", _LAUNCH_OF_PYTHON] if getattr(sys, "frozen", False) else [launch.__file__]
    return [python, "-P", *script, "driver.service.process", name, listener, place.apart]


def _start(name: str, place: Place, listener: socket.socket, *more: str) -> None:
    """Start the launcher. `more`: arguments of the device's process. Raise DeviceFailed when it fails, or does not end
    as one does: then it is no Python.
    """
    command = [*_command(name, place, str(listener.fileno())), *more]
    with open(place.log, "ab") as log:  # both processes append, and cut it when it has grown
        try:
            launcher = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                cwd="/",
                env=_variables(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        except OSError as error:
            if error.filename != command[0]:
                raise
            why = f"{command[0]} cannot be run: {error.strerror}"
            raise DeviceFailed(f"device {name!r} did not start: {why}; {interpreter.REMEDY}") from error
    try:
        code = launcher.wait(_LAUNCH)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        why = f"{command[0]} did not behave like a Python within {_LAUNCH:g} s"
        raise DeviceFailed(
            f"device {name!r} did not start: {why}; {interpreter.REMEDY}; {place.end_of_log()}"
        ) from None
    if code:
        raise DeviceFailed(f"device {name!r} did not start: {command[0]} ended with {code}; {place.end_of_log()}")
