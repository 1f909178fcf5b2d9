"""`burst serve`: a device in the foreground, under an account of its own, for that account or for a group.

The command binds the socket and then becomes the process that a client would start: isolated, in a clean environment,
with an engine beside it. Unlike that process it stays without clients, and ends on SIGTERM or SIGINT.

A driver in a shared library may crash. So its service is a child of the command's process, which holds the sockets, and
starts another service when that has ended with its engine: clients that connect meanwhile wait, and are served.
"""

from __future__ import annotations

import grp
import logging
import os
import select
import signal
import socket
import stat
import sys
import time
import warnings
from collections import deque
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from burst.real_time import PRIORITY
from burst_engine.names import install_command
from driver.client import discovery
from driver.client.served_sockets import owner_of
from driver.config import home, listed_home
from driver.devices import device_class, usable_class
from driver.devices.library.description import absolute
from driver.engine import sandbox, state
from driver.engine.call_rules import of_broker
from driver.engine.landlock import Access
from driver.engine.real_time import RealTime, refusal
from driver.errors import DeviceFailed
from driver.service import subordinate_uids
from driver.service.bounded_log import BoundedHandler, LogFile
from driver.service.broker import Broker
from driver.service.cell import settle
from driver.service.cell_uids import CellUids, uids_in
from driver.service.client_source import ListeningSocket
from driver.service.closing_process import ClosingProcess
from driver.service.engine_group import EngineGroups
from driver.service.fork_server import SCORES, end_with_parent
from driver.service.health import VARIABLES, NotifyPipe, begin_monitoring
from driver.service.process import ServiceOptions, kept_files, leave_no_core, run
from driver.service.signals import ENDS, readable_at_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from driver.service.cell import Cell
    from driver.service.process import Service

DEFAULT_DIR = Path("/run/burst")
_SIGNALS = (*ENDS, signal.SIGHUP)
_SEVERAL = 2  # exit status: the device may have several engines
CELL_LINGER = 5.0
"""Seconds that the cell of an account stays without clients."""

_MOST_ENDS, _WITHIN = 10, 60.0  # of a service that is started again; seconds
_CAPABILITIES = "CAP_SETUID CAP_SETGID CAP_KILL"
_FOR_UIDS = {
    "CapabilityBoundingSet=": f"CapabilityBoundingSet={_CAPABILITIES}\nAmbientCapabilities={_CAPABILITIES}\n"
    "# With these, it loads no module from the account's home.\nEnvironment=PYTHONNOUSERSITE=1",
    "StateDirectoryMode=0700": "# Cells go through it to their homes.\nStateDirectoryMode=0711",
}
"""What the unit has in place of these lines where cells have uids of their own."""

_FOR_DYNAMIC_USERS = {
    "User=@user@\n": "# systemd makes this account, while a device runs.\nUser=@user@\nDynamicUser=yes\n"
    "Environment=HOME=/var/lib/burst\n",
    "# The sockets of other devices lie in this folder, too.\nRuntimeDirectory=burst\n": "RuntimeDirectory=burst/%i\n",
    "RuntimeDirectoryPreserve=yes\n": "",  # what is kept for such an account, no other one can enter
    "serve %i ": "serve %i --dir /run/burst/%i ",
}
"""The same where systemd makes the account."""

_FOR_REAL_TIME = {
    ", and none of it is locked.": ".",
    "LimitMEMLOCK=8M": "# What bursts in real time lock: their queues and pools.\nLimitMEMLOCK=256M\n"
    "# All bursts are served in real time. A thread of the device may run for 0.2 s without a pause.\n"
    f"LimitRTPRIO={PRIORITY}",
    "RestrictRealtime=yes": "RestrictRealtime=no",
    " $BURST_OPTIONS": " --real-time $BURST_OPTIONS",
}
"""The same where all bursts are served in real time."""

_RUN = "from driver.service.serve import main; main()  # burst serve"
"""Its comment is what `ps` and `pgrep -f "burst serve"` find; the device's name follows it."""


def serve(
    name: str,
    folder: Path = DEFAULT_DIR,
    group: str | None = None,
    metrics: str | None = None,
    files_of_others: bool = False,
    uids: str | None = None,
    real_time: bool = False,
    tell: Callable[[Path, str | None], object] | None = None,
) -> NoReturn:
    """Become the service of a device, until SIGTERM or SIGINT.

    Args:
        name: of the device, or the path of a shared library that is its driver.
        folder: for its socket.
        group: its members may connect, too; a name or a number.
        metrics: address of metrics and health, as `metrics_server.listen` takes it. Needs the extra `metrics`.
        files_of_others: takes model files from all accounts, where these share an engine.
        uids: "FIRST-LAST", uids and gids for the cells of other accounts, where each account has an engine of its own;
            None: all have this process's.
        real_time: serves all bursts in real time, of all accounts that may connect.
        tell: called with the socket and the address of the metrics when clients may connect; None prints both.

    Raise DeviceNotFound, DeviceFailed.
    """
    name = absolute(name)
    usable_class(name)  # raises DeviceNotFound
    if real_time and (why := refusal()):
        raise DeviceFailed(f"--real-time: {why}")
    gid = None if group is None else _gid(group)
    os.umask(0o077)
    if uids:
        CellUids.prepare(uids, gid)
    place = discovery.Place(_checked(folder.absolute(), gid), discovery.short_name(name), "use a shorter --dir")
    sandbox.end_idle_threads()  # which would take the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the service can take them
    exposed = None if metrics is None else _exposed(metrics, gid)
    listener = _listener(name, place, gid)
    (tell or partial(_tell, name))(place.socket, exposed[1] if exposed else None)
    fds = listener.fileno(), exposed[0].fileno() if exposed else -1
    _become(name, place, fds, uids or "", gid is not None, files_of_others, tell is not None, real_time)


def unit(
    user: str, group: str, command: str, uids: str | None = None, *, is_dynamic: bool = False, real_time: bool = False
) -> str:
    """Return the template unit for systemd: `systemctl start burst@DEVICE`.

    `command`: the path of `burst`. `uids`, `real_time`: as of `serve`. `is_dynamic`: systemd makes the account.
    Raise DeviceFailed.
    """
    text = resources.files("driver.service").joinpath("burst@.service").read_text()
    changes: dict[str, str] = _FOR_DYNAMIC_USERS if is_dynamic else {}
    if real_time:
        changes = changes | _FOR_REAL_TIME
    if uids == subordinate_uids.WORD:
        raise DeviceFailed("--uids subuids: a unit gives the device capabilities instead: give it FIRST-LAST")
    if uids:
        uids_in(uids)
        changes = changes | _FOR_UIDS | {"--group @group@": f"--group @group@ --uids {uids}"}
    for line, ours in changes.items():
        text = text.replace(line, ours)
    for name, value in {"user": user, "group": group, "burst": command}.items():
        text = text.replace(f"@{name}@", value)
    return text


def main() -> None:
    """Entry point of that process. Arguments: device name; sockets of service and metrics; the uids of cells, or "";
    whether it serves every account that may open its socket; whether it takes model files from all of them; whether it
    prints nothing; whether it serves in real time.
    """
    name, (fd, metrics_fd) = sys.argv[1], map(int, sys.argv[2:4])
    uids, (is_open, files_of_others, is_quiet, in_real_time) = sys.argv[4], (word == "True" for word in sys.argv[5:9])
    real_time = RealTime(is_given=in_real_time, may_be_asked=not is_open)
    groups, of_cells = EngineGroups.of_this_process(), CellUids.of(uids) if uids else None
    if of_cells and of_cells.capabilities:
        sandbox.keep_uids(of_cells.uids)  # before it loads the device
    stop = readable_at_signals(*_SIGNALS)
    place = discovery.Place(Path(os.environ["BURST_RUNTIME_DIR"]), discovery.short_name(name))
    monitored = partial(begin_monitoring, address=str(place.socket), metrics_fd=metrics_fd, is_quiet=is_quiet)
    if is_open and not _has_one_engine(name):
        listener = socket.socket(fileno=fd)
        broke(
            name,
            listener,
            place,
            stop,
            metrics_fd=metrics_fd,
            monitored=monitored,
            cell_uids=of_cells,
            groups=groups,
            real_time=real_time,
        )
    if device_class(name).asked_apart:
        sandbox.keep_capabilities(sandbox.OF_CELLS | real_time.capabilities)  # it begins no cells
        stay(name, place, fd)
    options = ServiceOptions(None, is_open, stop, monitored, files_of_others=files_of_others, real_time=real_time)
    if groups and not options.is_shared:
        options = options._replace(group=groups.begin())
    run(name, ListeningSocket(socket.socket(fileno=fd), place), place, options)


def _has_one_engine(name: str) -> bool:
    """Return True if all accounts share an engine, as the device stands for one thing.

    Asked in a process that is thrown away: a device may begin threads, or take an accelerator, when it is made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads survive forks
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != _SEVERAL
    try:
        device = device_class(name)()
        os._exit(0 if device.needs.is_one_of_a_kind(device.type) else _SEVERAL)
    finally:  # it fails again when it is served, and says why
        os._exit(1)


def broke(
    name: str,
    listener: socket.socket,
    place: discovery.Place,
    stop: int,
    metrics_fd: int,
    monitored: Callable[[Service], bool],
    cell_uids: CellUids | None,
    groups: EngineGroups | None,
    real_time: RealTime,
) -> NoReturn:
    """Become the broker of a device that has an engine for each account."""
    log = LogFile(place.log)
    logging.basicConfig(level=logging.INFO, handlers=[BoundedHandler(log.write, "the broker's log")])
    leave_no_core()
    kind = device_class(name)
    of_cells = {state.made_for_all(): Access.EDIT} | SCORES  # see `settle`; cells give up more
    if cell_uids:
        of_cells[cell_uids.homes] = Access.EDIT
    if groups:
        of_cells[groups.path] = Access.EDIT
    kept = sandbox.OF_CELLS | real_time.capabilities | (cell_uids.capabilities if cell_uids else 0)
    sandbox.enter_files(kind, kept_files(place, kind) | of_cells, kept, locks=real_time.locks)
    needs = kind.needs if kind.asked_apart else kind().needs  # what it has loaded, all cells share
    notices = NotifyPipe()

    def become(cell: Cell, uid: int) -> NoReturn:
        settle(uid)
        is_home, stop = uid == os.getuid(), readable_at_signals(*_SIGNALS)
        if cell_uids and not is_home:
            cell_uids.become(uid)
        if is_home:
            notices.enter()

        def begin(service: Service) -> None:
            if monitored(service):
                cell.ready()

        linger, on_start = (None, begin) if is_home else (CELL_LINGER, None)
        if os.environ.get("WATCHDOG_PID") == str(os.getppid()):
            os.environ["WATCHDOG_PID"] = str(os.getpid())
        options = ServiceOptions(linger, True, stop, on_start, account=uid, real_time=real_time)
        run(name, cell, place, options._replace(group=cell.group, is_second=cell.is_second))

    def confine() -> None:
        sandbox.keep_capabilities(sandbox.OF_CELLS)
        sandbox.enter(needs.system_calls)

    closing = ClosingProcess(confine)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    home_fds = [notices.writable, *([metrics_fd] if metrics_fd >= 0 else [])]
    broker = Broker(
        listener, place, stop, become, home_fds=home_fds, log=log, closing=closing, cell_uids=cell_uids, groups=groups
    )
    broker.watch(notices.readable, notices.forward)
    if not _filter_broker(needs.system_calls, cell_uids) and cell_uids:
        with place.locked_to_leave() as is_locked:
            place.leave(listener, is_locked=is_locked)
        raise DeviceFailed("--uids: the broker could become any account, as nothing filters its calls: leave it away")
    broker.run()


def _filter_broker(needed: Collection[str], cell_uids: CellUids | None) -> bool:
    """Leave the broker its calls, those that the device needs and those by which it begins cells. False: the kernel
    cannot.
    """
    uids, takes = (cell_uids.uids, cell_uids.takes_namespaces) if cell_uids else (None, False)
    return sandbox.enter(needed, beside=of_broker(needed, uids, takes_namespaces=takes))


def stay(name: str, place: discovery.Place, fd: int) -> None:
    """Fork the process that is to serve, in which alone this returns, and another each time that it has ended.

    The parent ends when it is stopped, or with 1 after too many ends. `fd`: the listening socket.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ends: deque[float] = deque(maxlen=_MOST_ENDS)
    notices = NotifyPipe()
    while True:
        parent, child = os.getpid(), os.fork()
        if not child:
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            if os.environ.get("WATCHDOG_PID") == str(parent):
                os.environ["WATCHDOG_PID"] = str(os.getpid())
            notices.enter()
            with suppress(OSError):
                os.close(notices.systemd)
            return
        _forward_until_end(notices, child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        now = time.monotonic()
        is_often = len(ends) == _MOST_ENDS and now - ends[0] < _WITHIN
        if not code or is_often:
            with place.locked_to_leave() as is_locked:
                place.leave(socket.socket(fileno=fd), is_locked=is_locked)
            os._exit(bool(code))
        ends.append(now)
        print(f"{name}: its service has ended; another one is started", file=sys.stderr, flush=True)


def _forward_until_end(notices: NotifyPipe, child: int) -> None:
    """Forward the messages of a child until it has ended."""
    pidfd = os.pidfd_open(child)
    try:
        while pidfd not in select.select([pidfd, notices.readable], [], [])[0]:
            notices.forward()
    finally:
        os.close(pidfd)


def _exposed(address: str, gid: int | None) -> tuple[socket.socket, str]:
    """Return a socket for metrics and health, and its address. Raise DeviceFailed."""
    try:
        from driver.service import metrics_server
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise DeviceFailed(f"--metrics needs prometheus_client: {install_command('metrics')}") from None
    listener = metrics_server.listen(address)
    if gid is not None and "/" in address:
        _give(Path(address), gid, 0o660)
    return listener, metrics_server.where(listener)


def _tell(name: str, socket: Path, metrics: str | None) -> None:
    print(f"{name} is served at {socket}", flush=True)
    if metrics:
        print(f"metrics and health are at {metrics}", flush=True)


def _gid(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise DeviceFailed(f"--group {group}: there is no such group; make it with `groupadd {group}`") from None


def _checked(folder: Path, gid: int | None) -> Path:
    """Return the folder, made if it is missing. It must belong to this account, and the group must be able to
    enter it.
    """
    try:
        _make(folder, gid)
        folder = folder.resolve()
        found, owner = folder.stat(), owner_of(folder)
    except OSError as error:
        raise DeviceFailed(
            f"--dir {folder}: uid {os.getuid()} cannot make it ({error.strerror}); "
            "have root make it and give it to this account, or use another"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or owner != os.getuid() or mode & 0o027:
        raise DeviceFailed(
            f"--dir {folder}: must be a folder of uid {os.getuid()} that others can neither write to nor enter; "
            f"it belongs to uid {owner} and has mode {mode:04o}: chmod 0750 it, or use another"
        )
    if gid is not None and (found.st_gid != gid or mode & 0o050 != 0o050):
        raise DeviceFailed(
            f"--dir {folder}: group {gid} cannot enter it; chgrp {gid} {folder} && chmod 0750 {folder}, or use another"
        )
    return folder


def _make(folder: Path, gid: int | None) -> None:
    """Make the folder if it is missing. Its parent must exist, as its permissions are for its owner to decide."""
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        return
    if gid is not None:
        try:
            _give(folder, gid, 0o750)
        except BaseException:
            folder.rmdir()
            raise


def _give(path: Path, gid: int, mode: int) -> None:
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        raise DeviceFailed(
            f"--group {gid}: uid {os.getuid()} is not a member of that group and cannot give it {path}; "
            "add the account to the group"
        ) from None
    path.chmod(mode)


def _listener(name: str, place: discovery.Place, gid: int | None) -> socket.socket:
    """Return a listening socket. Raise DeviceFailed if another process listens there."""
    with place.locked() as is_ours:
        if found := discovery.find(place):
            found.close()
            raise DeviceFailed(
                f"{place.socket}: {name!r} is already served there; stop that service, or use another --dir"
            )
        if not is_ours:
            raise place.held()
        listener = discovery.listen(place)
        try:
            if gid is not None:
                _give(place.socket, gid, 0o660)
        except BaseException:
            place.leave(listener)
            raise
    return listener


def _become(name: str, place: discovery.Place, fds: Sequence[int], uids: str, *flags: bool) -> NoReturn:
    """Replace this process. Keep the sockets, stdout, stderr and systemd's variables of what it was given.

    `uids`, `flags`: as of `main`.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first = 3
    for fd in sorted(fd for fd in fds if fd >= 0):
        os.set_inheritable(fd, True)
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    said = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    environment = discovery.environment(place.socket.parent) | {"HOME": str(listed_home() or home())} | said
    own = ["-s"] if uids else []  # with capabilities, nothing from the account's home
    words = [sys.executable, "-P", *own, "-c", _RUN, name, *map(str, (*fds, uids, *flags))]
    os.execve(sys.executable, words, environment)  # noqa: S606
