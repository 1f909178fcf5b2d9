"""The broker of a device for several accounts, which gives each account a cell: a service and an engine of its own.

It accepts connections, asks the kernel whose they are, and hands the accepted socket to the cell of that account, which
it forks when it has none. It reads no message of a client's, maps no memory of a client's, and takes no descriptor of
one but its socket; what a client sends to crash or to exhaust a device reaches the cell of its own account alone. A
cell that has ended is forked again for the account's next client.

One thread, which waits for nothing but its poll: a cell that reads nothing, or floods, costs its own account's clients.
So it can fork at any time, and a new cell has the device's modules in memory already, shared with all others.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import mmap
import os
import select
import signal
import socket
import struct
import time
import warnings
from array import array
from collections import deque
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from burst import GeneralFailure, Malformed, PeerDied, ResourceExhaustedTransient, StatusError, Timeout
from burst.channel import Channel, Message, close_all, pack
from burst.exhaustion import exhausted
from driver.engine.limits import limits
from driver.protocol.census import Census
from driver.protocol.rpc import refuse_unheard
from driver.service.bounded_log import Allowance, LogFile, LogPipe
from driver.service.cell import PAGE, Cell
from driver.service.client_census import ClientCensus
from driver.service.fork_server import close_all_but, end_with_parent
from driver.service.last_descriptor import LastDescriptor
from driver.service.signals import is_hangup

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.client.discovery import Place
    from driver.service.cell_uids import CellUids
    from driver.service.closing_process import ClosingProcess
    from driver.service.engine_group import EngineGroup, EngineGroups

_log = logging.getLogger(__name__)
_NOW = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RETRY = 0.1  # seconds after a failed accept
_END_TIMEOUT = 5.0  # seconds until a cell that ends is killed
_WITHIN, _FREELY = 60.0, 3  # so many ends of a cell within so many seconds have no delay
_DELAY = 1.0  # seconds until a cell that ends often is forked again
_REPLACED = 2  # cells of an account that have renewed themselves, and wait for their clients to move
_HANG_UP = 0  # no event but those that poll always reports
_COUNTS, _F_SEAL_FUTURE_WRITE = struct.Struct("@QQQ"), 0x10
_TICK = 0.05  # seconds between two looks at what is due


class CellProcess:
    """A cell, as the broker sees it."""

    def __init__(self, uid: int, pid: int, channel: Channel, log: LogPipe) -> None:
        self.uid, self.pid, self.channel, self.log = uid, pid, channel, log
        self.pidfd = os.pidfd_open(pid)
        self.sent, self.left = 0, 0  #: clients that were handed over, and of these, that have left
        self.is_ending = False  #: it takes no clients any more
        self.kill_at: float | None = None

    def tell(self, body: list[object], *fds: int) -> bool:
        """Send without waiting; return False if the cell reads nothing. Raise PeerDied if it has ended."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self.channel.socket.sendmsg([pack(body)], rights, _NOW)
        except (BrokenPipeError, ConnectionError) as error:
            raise PeerDied(f"the cell of uid {self.uid} has ended") from error
        except OSError:
            return False
        return True


class CellCounts:
    """The `CensusCounts` of the cells, as a monitor reads them: clients, and cells in place of bursts."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("cells", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, Census.nbytes)
        self._memory = mmap.mmap(self.fd, Census.nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # no cell can write to it
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        self._changes = 0

    def note(self, changes: int, cells: int, clients: int) -> None:
        """Write the counts. `changes`: cells that have begun or ended since."""
        self._changes += changes
        self._memory[: _COUNTS.size] = _COUNTS.pack(self._changes, clients, cells)


class ServedAccount:
    """An account that has a cell, or clients that wait for one."""

    def __init__(self, uid: int) -> None:
        self.cell: CellProcess | None = None
        self.replaced: list[CellProcess] = []  #: cells that have renewed themselves, with clients that have not moved
        self.allowance = Allowance(f"the log of uid {uid}")  # of all its cells, however often one begins
        self.waiting: deque[Channel] = deque()  #: clients that its cell has not been given yet
        self.ends: deque[float] = deque(maxlen=_FREELY)

    @property
    def is_idle(self) -> bool:
        """No cell, and no client that waits for one."""
        return self.cell is None and not self.waiting and not self.replaced

    @property
    def cells(self) -> list[CellProcess]:
        """All its cells."""
        return [*self.replaced, *([self.cell] if self.cell else [])]

    @property
    def may_begin(self) -> bool:
        """True if its next cell may begin now: there is none, and it has not ended too often."""
        now = time.monotonic()
        is_often = len(self.ends) == _FREELY and now - self.ends[0] < _WITHIN
        return self.cell is None and not (is_often and now - self.ends[-1] < _DELAY)

    def note_end(self) -> None:
        """Note that its cell has failed, or has renewed itself."""
        self.ends.append(time.monotonic())

    def take_those_that_left(self) -> list[Channel]:
        """Return the clients that have left while they waited; they wait no more."""
        if not self.waiting:
            return []
        poll = select.poll()
        for client in self.waiting:
            poll.register(client, _HANG_UP)
        gone = {fd for fd, _ in poll.poll(0)}
        found = [client for client in self.waiting if client.fileno() in gone]
        self.waiting = deque(client for client in self.waiting if client.fileno() not in gone)
        return found


class Broker:
    """Listens on a device's socket."""

    def __init__(
        self,
        listener: socket.socket,
        place: Place,
        stop: int,
        become: Callable[[Cell, int], NoReturn],
        home_fds: list[int],
        log: LogFile,
        closing: ClosingProcess,
        cell_uids: CellUids | None = None,
        groups: EngineGroups | None = None,
    ) -> None:
        """`stop`: a descriptor; the device ends when it becomes readable. `become`: in a new process, serves an
        account. `home_fds`: what the cell of the device's own account needs beside. `log`: where all cells write.
        `cell_uids`: of the cells of other accounts, which `become` takes; None: all have this process's. `groups`:
        for the engines; None: they have no control groups of their own.
        """
        self._listener, self._place, self._stop = listener, place, stop
        self._named = os.stat(place.socket)
        self._become, self._home_fds, self._home = become, home_fds, os.getuid()
        self._limits = limits()
        self._accounts, self._census = dict[int, ServedAccount](), ClientCensus(self._limits)
        self._log, self._closing, self._cell_uids, self._groups = log, closing, cell_uids, groups
        self._counts, self._last = CellCounts(), LastDescriptor()
        self._is_open = False  #: the device has passed its self test
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        listener.setblocking(False)

    def run(self) -> NoReturn:
        """Serve until it is stopped, or until the device fails its self test."""
        self.watch(self._stop, self._signalled)
        self.watch(self._closing.fileno(), self._closing.look)
        gc.freeze()
        self._begin(self._home, self._accounts.setdefault(self._home, ServedAccount(self._home)))
        while True:
            due = [self._handlers.get(fd) for fd, _ in self._poll.poll(self._patience())]
            for handler in (*due, self._do_what_is_due):
                try:
                    if handler:
                        handler()
                except Exception:  # noqa: BLE001 (whatever fails for one account, the others are served)
                    _log.exception("the broker failed for one account")

    # ---- clients

    def _accept(self) -> None:
        if not self._closing.has_room:
            self._unwatch(self._listener.fileno())
            return
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # the client has left, or too many files are open: go on serving others
            _log.error("a client could not be accepted: %s", error)
            self._last.turn_away(self._listener, error, self._closing.close)
            time.sleep(_RETRY)
            return
        client = Channel(sock)
        uid = client.peer_uid or self._home  # root sees all accounts, as the device's own does
        try:
            self._check_accounts(uid)
            self._forget_those_that_left()
            self._census.enter(uid)
        except ResourceExhaustedTransient as error:
            self._refuse(client, error)
            return
        self._hand_over(client, uid)
        self._publish()

    def _check_accounts(self, uid: int) -> None:
        """Raise ResourceExhaustedTransient if this account needs a cell, and there are as many as there may be."""
        account = self._accounts.get(uid)
        if account is None or account.is_idle:
            served = sum(not each.is_idle for each in self._accounts.values())
            self._limits.check("device_accounts", served, "wait until the clients of another account have left")

    def _hand_over(self, client: Channel, uid: int) -> None:
        """Give a client, which the census has counted, to the cell of its account."""
        account = self._accounts.setdefault(uid, ServedAccount(uid))
        account.waiting.append(client)
        if not account.may_begin:
            self._send_waiting(account)
            return
        try:
            self._begin(uid, account)
        except OSError as error:
            _log.error("the cell of uid %d cannot begin: %s", uid, error)
            account.waiting.remove(client)
            self._census.leave(uid)
            self._refuse(client, exhausted(error) or GeneralFailure(f"your account's engine cannot begin: {error}"))

    def _send_waiting(self, account: ServedAccount) -> None:
        """Give an account's clients to its cell, as many as that takes now."""
        cell = account.cell
        while account.waiting and cell and not cell.is_ending:
            client = account.waiting[0]
            try:
                if not cell.tell(["client"], client.fileno()):
                    return  # it reads nothing yet, as one that begins
            except PeerDied:
                self._let_go(cell)
                return
            self._closing.close(account.waiting.popleft().socket, cell.uid)
            cell.sent += 1

    def _refuse(self, client: Channel, error: StatusError) -> None:
        """Answer the client's first message, which is not received, with the error, and close the connection."""
        refuse_unheard(client, error)
        self._closing.close(client.socket)

    # ---- cells

    def _begin(self, uid: int, account: ServedAccount) -> None:
        """Fork the cell of an account, and hand over the clients that wait for it. Raise OSError."""
        account.note_end()  # unless all goes well
        log = LogPipe(account.allowance)
        try:
            account.cell = cell = self._forked(uid, log, is_second=bool(account.replaced))
        except OSError:
            os.close(log.readable)
            raise
        finally:
            os.close(log.writable)
        account.ends.pop()
        self.watch(cell.channel.fileno(), partial(self._read, cell))
        self.watch(cell.pidfd, partial(self._reap, cell))
        self.watch(cell.log.readable, partial(self._copy_log, cell))
        self._publish(+1)
        self._send_waiting(account)

    def _copy_log(self, cell: CellProcess) -> None:
        if cell.log.is_open:  # and was not closed by an event just before
            cell.log.copy_to(self._log)
        if not cell.log.is_open:
            self._unwatch(cell.log.readable)

    def _forked(self, uid: int, log: LogPipe, *, is_second: bool) -> CellProcess:
        if self._cell_uids and uid != self._home:
            self._cell_uids.assign(uid)
        (near, far), broker = Channel.pair(), os.getpid()
        group = self._groups.begin() if self._groups else None
        with warnings.catch_warnings(), far, closing(group) if group else nullcontext():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads survive forks
            pid = os.fork()
            if not pid:
                cell = Cell(far, None if uid == self._home else uid, group, is_second=is_second)
                self._become_cell(uid, cell, broker, log=log, group=group)
        try:
            return CellProcess(uid, pid, near, log)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            near.close()
            raise

    def _become_cell(self, uid: int, cell: Cell, broker: int, *, log: LogPipe, group: EngineGroup | None) -> NoReturn:
        try:
            if uid != self._home:  # whose stdout tells that the device is ready
                log.redirect()
            end_with_parent()
            if os.getppid() != broker:
                os._exit(1)
            is_home = uid == self._home
            of_uids = self._cell_uids.fds if self._cell_uids and not is_home else []
            close_all_but(cell.fileno(), *(self._home_fds if is_home else []), *of_uids, *(group.fds if group else []))
            self._become(cell, uid)
        except BaseException:  # noqa: BLE001 (this process must not go on as a second broker)
            _log.exception("the cell of uid %d failed", uid)
        finally:
            os._exit(1)

    def _read(self, cell: CellProcess) -> None:
        try:
            message = cell.channel.receive_nothing_else()
        except Timeout:
            return
        except (PeerDied, Malformed):
            self._let_go(cell)
            return
        try:
            self._handle(cell, message)
        except (Malformed, TypeError, ValueError):
            _log.error("the cell of uid %d sent an invalid message", cell.uid)
            os.kill(cell.pid, signal.SIGKILL)
            self._let_go(cell)
        finally:
            message.close()

    def _handle(self, cell: CellProcess, message: Message) -> None:
        """Do what a cell asks. A cell that a client has taken over can say anything. Raise Malformed."""
        match message.body:
            case ["left"] if cell.left < cell.sent:
                cell.left += 1
                self._census.leave(cell.uid)
                self._publish()
            case ["idle", int(came)]:
                if came == cell.sent and (cell.uid != self._home or cell in self._accounts[cell.uid].replaced):
                    self._let_go(cell)
            case ["renewing"]:
                self._replace(cell)
            case ["staying"]:
                self._put_back(cell)
            case ["ending"]:
                self._note_end(cell)
            case ["ready"] if cell.uid == self._home:
                if not self._is_open:
                    self._is_open = True
                    self.watch(self._listener.fileno(), self._accept)
            case ["cells", int(number), int(first)] if cell.uid == self._home and first >= 0:
                self._tell_of_cells(cell, number, first)
            case body:
                raise Malformed(f"{body!r:.100}")

    def _replace(self, cell: CellProcess) -> None:
        """Let another cell begin beside it for the next client of the account.

        An account that renews its engine again and again has no more cells by that, nor has one begun without delay: of
        those whose clients have not moved, the oldest end.
        """
        account = self._accounts[cell.uid]
        if cell is account.cell and not cell.is_ending:
            account.note_end()
            account.replaced.append(cell)
            account.cell = None
            for oldest in account.replaced[:-_REPLACED]:
                if not oldest.is_ending:
                    _log.error("the cell of uid %d has ended: its clients have not moved to the next but one", cell.uid)
                    self._let_go(oldest)

    def _put_back(self, cell: CellProcess) -> None:
        """Give it the account's new clients again, unless there is another cell that takes them."""
        account = self._accounts[cell.uid]
        if account.cell is None and cell in account.replaced and not cell.is_ending:
            account.replaced.remove(cell)
            account.cell = cell
            self._send_waiting(account)

    def _tell_of_cells(self, asking: CellProcess, number: int, first: int) -> None:
        found = [a.cell for a in self._accounts.values() if a.cell and not a.cell.is_ending]
        uids, fds = list[int](), list[int]()
        try:
            for cell in found[first : first + PAGE]:
                near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with near, far, suppress(PeerDied):
                    if cell.tell(["watcher"], far.fileno()):
                        fds.append(near.detach())
                        uids.append(cell.uid)
            with suppress(PeerDied):
                asking.tell(["cells", number, len(found), *uids], *fds, self._counts.fd)
        finally:
            close_all(fds)

    def _let_go(self, cell: CellProcess) -> None:
        """Hand this cell no more clients, and close its channel: it has none, or is ending by itself."""
        self._note_end(cell)
        if cell.channel.fileno() >= 0:
            self._unwatch(cell.channel.fileno())
            self._closing.close(cell.channel.socket, cell.uid)

    def _note_end(self, cell: CellProcess) -> None:
        cell.is_ending = True
        cell.kill_at = cell.kill_at or time.monotonic() + _END_TIMEOUT

    def _reap(self, cell: CellProcess) -> None:
        """Reap its process, which has ended."""
        pid, status = os.waitpid(cell.pid, os.WNOHANG)
        if not pid:
            return
        self._let_go(cell)
        self._unwatch(cell.pidfd)
        os.close(cell.pidfd)
        self._unwatch(cell.log.readable)
        cell.log.finish(self._log)
        account = self._accounts[cell.uid]
        if cell is account.cell:
            account.cell = None
        else:
            account.replaced.remove(cell)
        self._census.leave(cell.uid, cell.sent - cell.left)
        self._publish(+1)
        if status:
            account.note_end()
            _log.error("the cell of uid %d has ended", cell.uid)
        if cell.uid == self._home and not self._is_open:
            self._end(1)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._closing.is_waiting:
            self._closing.look()
        if self._is_open and self._closing.has_room and self._listener.fileno() not in self._handlers:
            self.watch(self._listener.fileno(), self._accept)
        self._forget_those_that_left()
        for uid, account in list(self._accounts.items()):
            for cell in account.cells:
                if cell.kill_at is not None and cell.kill_at <= now:
                    os.kill(cell.pid, signal.SIGKILL)
                    cell.kill_at = float("inf")
            if (account.waiting or uid == self._home) and account.may_begin:
                self._begin(uid, account)
            elif account.waiting:
                self._send_waiting(account)
            elif account.is_idle and not (account.ends and now - account.ends[-1] < _WITHIN):
                del self._accounts[uid]

    def _forget_those_that_left(self) -> None:
        for uid, account in self._accounts.items():
            for client in account.take_those_that_left():
                self._closing.close(client.socket)
                self._census.leave(uid)

    def _patience(self) -> float | None:
        """Return the milliseconds until something may be due; None: nothing will be."""
        is_due = self._closing.is_waiting or any(
            each.waiting or any(cell.kill_at for cell in each.cells) or (not each.cell and uid == self._home)
            for uid, each in self._accounts.items()
        )
        return _TICK * 1e3 if is_due else None

    def _publish(self, changes: int = 0) -> None:
        """Write the counts for monitors. `changes`: cells that have begun or ended."""
        cells = sum(len(each.cells) for each in self._accounts.values())
        self._counts.note(changes, cells, self._census.total())

    # ---- the loop

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call the handler, which waits for nothing, whenever the descriptor is readable."""
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None):
            self._poll.unregister(fd)

    def _signalled(self) -> None:
        if not is_hangup(self._stop):
            self._end()
        for account in self._accounts.values():
            if account.cell:
                with suppress(PeerDied):
                    account.cell.tell(["renew"])

    def _end(self, code: int = 0) -> NoReturn:
        """End the cells, and this process."""
        with self._place.locked_to_leave() as is_locked:
            self._place.leave(self._listener, is_locked=is_locked, named=self._named)
        cells = [cell for account in self._accounts.values() for cell in account.cells]
        for cell in cells:
            cell.channel.close()
        end = time.monotonic() + _END_TIMEOUT
        for cell in cells:
            if not select.select([cell.pidfd], [], [], max(0.0, end - time.monotonic()))[0]:
                os.kill(cell.pid, signal.SIGKILL)
        os._exit(code)
