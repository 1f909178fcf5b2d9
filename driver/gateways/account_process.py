"""The processes of a gateway that root starts for several accounts: one for each account, and their keeper.

    keeper      root without capabilities, which can do no more than take the sockets away at the end
      server    an account: decodes, and answers, what that account sends
        starter root, with the capabilities of a device: finds and starts the device, and reads nothing of clients

A server binds its sockets as root, and then becomes its account for good: it has no capability, gains no privilege, and
makes the system calls of a program that computes, on itself alone. No two accounts share an interpreter, a client of
the device, or a uid. Its end is that of the keeper; its starter's is its own. Where a device is served to several
accounts, the server connects to it as its account, and there is no starter.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pwd
import select
import signal
import stat
import time
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, Self

from burst import BurstError, Malformed, PeerDied, Timeout
from burst.channel import Channel, Message
from driver.client import discovery
from driver.client.served_sockets import is_path
from driver.config import NOWHERE
from driver.engine import landlock, sandbox
from driver.engine.call_rules import Reach
from driver.engine.landlock import Access
from driver.errors import DeviceFailed, DriverError
from driver.importers.files import READERS, runs_files
from driver.protocol import rpc
from driver.protocol.rpc import Reply, call
from driver.service.bounded_log import Allowance, LogFile, LogPipe
from driver.service.fork_server import close_all_but

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from driver.gateways.door_address import DoorAddress

_LOG = logging.getLogger("burst.gateway")
_ENDS = (signal.SIGTERM, signal.SIGINT)
_OPENED, _STARTED = 60.0, 90.0  # seconds until a server has bound its sockets; until a device has started
_GRACE, _LATE = 30, 5.0  # seconds until a server that is to end is killed by its alarm; and until that is noted
_BIND_LOW_PORTS = 1 << 10  # CAP_NET_BIND_SERVICE
_FIRST_FREE_PORT = 1024


class AccountServer(Protocol):
    """A gateway's server for one account. Made, it has bound its addresses."""

    addresses: list[str]

    def begin(self) -> None:
        """Serve from now on."""

    def close(self) -> None:
        """Finish what runs."""


class GatewayAccount(NamedTuple):
    """An account under which a gateway process runs. groups: beside its own, those of what it needs."""

    uid: int
    groups: tuple[int, ...]
    reads: tuple[Path, ...]

    @classmethod
    def of(cls, uid: int, device: str, reads: Iterable[Path]) -> GatewayAccount:
        """Return an account with the groups of the files that it reads and of the served device's socket, but root's:
        so its process may use what root has chosen for it, and its other programs may not.
        """
        found, groups = tuple(reads), set[int]()
        for path in (*found, *([Path(device)] if _is_for_several(device) else [])):
            with suppress(OSError):
                groups.add(path.stat().st_gid)
        return cls(uid, tuple(groups - {0}), found)

    def enter(self) -> None:
        """Become this account in all threads, without capabilities. Raise DeviceFailed if it cannot read its files."""
        if self.uid != os.getuid():
            entry = pwd.getpwuid(self.uid)
            os.setgroups([*{*os.getgrouplist(entry.pw_name, entry.pw_gid), *self.groups}])
            os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
            os.setresuid(self.uid, self.uid, self.uid)
            _take_environment(entry)
        sandbox.keep_capabilities(0)
        for path in self.reads:
            if not os.access(path, os.R_OK | os.X_OK):
                raise DeviceFailed(
                    f"uid {self.uid} may not read {path}, which is served to it: chmod or chgrp it, and open the "
                    "folders above it"
                )


def _is_for_several(device: str) -> bool:
    """Return True for the path of a device that is served to a group."""
    with suppress(OSError):
        return is_path(device) and bool(os.stat(device).st_mode & stat.S_IWGRP)
    return False


def _take_environment(entry: pwd.struct_passwd) -> None:
    """Give this process the folders of that account, where its programs look for devices and options."""
    for name in [name for name in os.environ if name.startswith("XDG_") or name == "BURST_RUNTIME_DIR"]:
        del os.environ[name]
    os.environ |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    if os.path.isdir(session := f"/run/user/{entry.pw_uid}"):
        os.environ["XDG_RUNTIME_DIR"] = session


class DeviceStarter:
    """A process that finds and starts a device for this one. Any thread."""

    def __init__(self, device: str) -> None:
        """Fork it. No thread may exist yet."""
        self._channel, far = Channel.pair()
        with far:
            if not _forked():
                _become(partial(self._serve, device, far), far)
        self._asking = Lock()

    def connect(self, _name: str) -> Channel:
        """Return a connection to the device. Raise DeviceFailed, PeerDied."""
        with self._asking:
            (fault, has_ended), fds = call(self._channel, "connect", timeout=_STARTED)
        if has_ended:
            raise PeerDied(fault)
        if fault:
            raise DeviceFailed(fault)
        return Channel.from_fd(fds.pop())

    @classmethod
    def _serve(cls, device: str, channel: Channel) -> None:
        sandbox.bound_capabilities(sandbox.OF_CELLS)
        sandbox.keep_capabilities(sandbox.OF_CELLS)
        channel.refuse_descriptors()
        if is_path(device):  # it starts nothing that would inherit a filter
            sandbox.enter(reach=Reach(os.getpid(), connects=True))
        rpc.serve(channel, {"connect": partial(cls._connected, device)})

    @staticmethod
    def _connected(device: str, _: Message) -> Reply:
        try:
            with discovery.as_ours(), discovery.reach(device) as found:
                return Reply(["", False], [os.dup(found.fileno())])
        except PeerDied as error:
            return Reply([str(error), True])
        except DriverError as error:
            return Reply([str(error), False])


class AccountProcess:
    """The server of one account, as its keeper sees it."""

    def __init__(self, account: GatewayAccount, device: str, open_server: Callable[[], AccountServer], kept: int = 0):
        """Fork it. `kept`: the capabilities with which root's own binds its sockets."""
        self.uid = account.uid
        self._channel, far = Channel.pair()
        self._channel.refuse_descriptors()
        self._log, self._written = LogFile(NOWHERE), LogPipe(Allowance(f"the log of uid {account.uid}"))
        with far:
            self.pid = _forked()
            if not self.pid:
                self._written.redirect()
                _become(partial(_serve, account, device, open_server, far, kept), far)
        os.close(self._written.writable)
        self.pidfd = os.pidfd_open(self.pid)

    def opened(self) -> list[str]:
        """Return its addresses once it has bound them. Raise DeviceFailed if it cannot."""
        try:
            match self._channel.receive(_OPENED).body:
                case ["open", *addresses]:
                    return addresses
                case ["failed", str(why)]:
                    raise DeviceFailed(why)
        except (PeerDied, Timeout, Malformed) as error:
            raise DeviceFailed(f"the gateway process of uid {self.uid} has ended: its log says more") from error
        raise DeviceFailed(f"the gateway process of uid {self.uid} does not open its addresses")

    def begin(self) -> None:
        """Have it serve, and copy what it writes to the log, cleaned and bounded: it may write anything."""
        asyncio.get_running_loop().add_reader(self._written.readable, self._copy_log)
        with suppress(PeerDied):
            self._channel.send([])

    def _copy_log(self) -> None:
        self._written.copy_to(self._log)
        if not self._written.is_open:
            asyncio.get_running_loop().remove_reader(self._written.readable)

    def end(self) -> None:
        """Have it finish what runs, and end."""
        self._channel.close()

    def reap(self, until: float) -> bool:
        """Wait for its end; return False if it has failed, or has not ended by then."""
        if not select.select([self.pidfd], [], [], max(0.0, until - time.monotonic()))[0]:
            return False
        os.close(self.pidfd)
        with suppress(RuntimeError):  # there is no loop before it serves
            asyncio.get_running_loop().remove_reader(self._written.readable)
        self._written.finish(self._log)
        return not os.waitpid(self.pid, 0)[1]


class GatewayKeeper:
    """The servers of several accounts. `async with` serves, and ends them."""

    def __init__(self, processes: Sequence[AccountProcess], sockets: Mapping[str, Callable[[], object]]) -> None:
        """`sockets`: by path, how each is taken away. Raise DeviceFailed if one of the processes cannot open its own.

        From then on this process can do nothing else as root.
        """
        self._living, self._sockets, self._has_failed = {each.pidfd: each for each in processes}, sockets, False
        self.addresses: list[list[str]] = []  #: of each process
        try:
            for each in processes:
                self.addresses.append(each.opened())
            folders = {Path(path).parent for path in sockets}
            sandbox.bound_capabilities(0)
            sandbox.keep_capabilities(0)
            landlock.restrict(dict.fromkeys(folders, Access.REMOVE_FILE))
            sandbox.enter(reach=Reach(os.getpid()))
        except BaseException:
            self._end()
            raise

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for each in list(self._living.values()):
            loop.add_reader(each.pidfd, self._note_end, each)
            each.begin()
        return self

    async def __aexit__(self, *reason: object) -> None:
        loop = asyncio.get_running_loop()
        for pidfd in self._living:
            loop.remove_reader(pidfd)
        self._end()
        if self._has_failed:
            raise DeviceFailed("not all gateway processes have served until the end")

    def _note_end(self, process: AccountProcess) -> None:
        """Note that a process has ended by itself: the others go on."""
        asyncio.get_running_loop().remove_reader(process.pidfd)
        del self._living[process.pidfd]
        process.reap(time.monotonic())
        self._has_failed = True
        _LOG.error("the gateway process of uid %d has ended; start the gateway again to serve it", process.uid)
        if not self._living:
            signal.raise_signal(signal.SIGTERM)

    def _end(self) -> None:
        for each in self._living.values():
            each.end()
        until = time.monotonic() + _GRACE + _LATE
        ends = [each.reap(until) for each in self._living.values()]
        self._has_failed |= not all(ends)
        self._living.clear()
        for remove in self._sockets.values():
            remove()


def load_all(*names: str) -> None:
    """Load these modules, and what reads model files, which servers would load later: they share it, and an account may
    be unable to read this installation.
    """
    readers = [f"driver.importers.{kind}.{part}" for kind in READERS.values() for part in ("header", "reader")]
    for name in (*names, *readers):
        with suppress(ImportError):  # the server says what is missing
            import_module(name)
    for kind in READERS.values():
        runs_files(kind)  # remembers it


def kept_for(doors: Iterable[DoorAddress]) -> int:
    """Return the capabilities with which root's own server binds these addresses."""
    return _BIND_LOW_PORTS * any(0 < door.port < _FIRST_FREE_PORT for door in doors)


def _forked() -> int:
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads survive forks
        return os.fork()


def _become(do: Callable[[], object], channel: Channel) -> NoReturn:
    """Do that as a new process, which then ends. `channel`: all that it keeps of the one that has forked it."""
    try:
        for number in _ENDS:  # which a terminal, or systemd, sends to the keeper, too
            signal.signal(number, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # it is no account's terminal
        close_all_but(channel.fileno())
        do()
        os._exit(0)
    except (DriverError, BurstError, OSError) as error:
        with suppress(PeerDied):
            channel.send(["failed", str(error)])
    except BaseException:  # noqa: BLE001 (this process must not go on as the one that has forked it)
        _LOG.exception("a gateway process failed")
    finally:
        os._exit(1)


def _serve(
    account: GatewayAccount, device: str, open_server: Callable[[], AccountServer], channel: Channel, kept: int
) -> None:
    """Serve an account until the keeper ends."""
    if not _is_for_several(device):
        discovery.reach_by(DeviceStarter(device).connect)
    sandbox.bound_capabilities(0)
    if account.uid == os.getuid():
        sandbox.keep_capabilities(kept)  # before there are threads, which would keep theirs
    server = open_server()
    account.enter()
    sandbox.enter(reach=Reach(os.getpid(), connects=_is_for_several(device)))
    channel.send(["open", *server.addresses])
    with suppress(PeerDied):
        channel.receive()
        server.begin()
        channel.receive()
    signal.alarm(_GRACE)
    server.close()


__all__ = ["AccountProcess", "AccountServer", "GatewayAccount", "GatewayKeeper", "kept_for", "load_all"]
