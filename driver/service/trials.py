"""Trials of model files: the first load and the first run of a file happen in a process that is thrown away.

A file can hit a defect of the runtime that reads it, and end the process that the runtime is in. So a file that the
device has not seen yet is loaded, and run once on zeros, in a process of its own, before the engine loads it.

Such a process has to begin with the runtime in memory, to be cheap. It is forked by the trial server, a process with
one thread, which the service forks once it has loaded the device and before it starts threads. The server also tells
how the trial ended: the exit status, and the last words that the runtime wrote to its standard error.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import signal
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cffi import FFI

from burst import ErrorStatus, GeneralFailure, Malformed, PeerDied, Timeout
from burst.channel import Channel
from burst.errors import status_error
from burst.turns import give_way
from driver.deadlines import overdue, passed, seconds_left
from driver.interface import BindOptions, Preparation
from driver.protocol.model_codec import decode, sealed
from driver.protocol.rpc import failure, take_fd
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import Device, PreparedModel
    from driver.nn import Model, Operand
    from driver.options import Preference

LOAD_SECONDS = 60
"""Of processor time that a file may take to load; another such time for each gigabyte."""

RUN_SECONDS = 1.0
"""After so much of its first run a file has passed."""

UNPROVOKED = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from outside, or for lack of memory."""

_PATIENCE = 600.0  # seconds that a file may take to load, whatever it waits for
_SPARE = 10.0  # seconds beyond RUN_SECONDS for a busy machine
_MOST_BYTES = 1 << 30  # of arguments of the first run
_MOST_WORDS = 300  # characters
_STDERR, _LAST_FD = 2, 1 << 30

_ffi = FFI()
_ffi.cdef("int prctl(int option, unsigned long value);")
_libc: Any = _ffi.dlopen(None)
_PDEATHSIG = 1


class TrialEnded(Exception):
    """The process of a trial ended by itself, and so would the engine. The text says how."""

    def __init__(self, during: str, code: int, words: str) -> None:
        """`code`: its exit status, or minus the signal. `words`: the last that the runtime wrote."""
        how = f"with {signal_name(-code)}" if code < 0 else f"with exit status {code}"
        if -code == signal.SIGXCPU:
            how = f"after {LOAD_SECONDS} s of processor time and more ({signal_name(-code)})"
        elif -code == signal.SIGKILL:
            how += ", as for lack of memory"
        quoted = f'; the runtime\'s last words: "{words}"' if words else ""
        super().__init__(f"{during} ended the process of its trial {how}{quoted}")
        self.is_by_file = -code not in UNPROVOKED


class Trial(Closing):
    """One trial, as the service sees it. Closing it ends the process."""

    def __init__(self, channel: Channel) -> None:
        """Use `TrialServer.begin`."""
        self._channel = channel

    def wait_until_loaded(self, deadline: int | None = None) -> None:
        """Returns when the file is loaded. `deadline`: CLOCK_MONOTONIC ns.

        Raises TrialEnded; the StatusError that stands for what the device raised; MissedDeadlineTransient.
        """
        left = seconds_left(deadline)
        try:
            message = self._receive(_PATIENCE if left is None else min(left, _PATIENCE))
        except Timeout:
            if passed(deadline):
                raise overdue("preparing", deadline or 0) from None
            raise GeneralFailure(f"the model file was not loaded within {_PATIENCE:g} s, in a trial") from None
        match message:
            case ["refused", int(status), str(text), *_]:
                raise status_error(ErrorStatus(status), text)
            case ["ended", int(code), str(words)]:
                raise TrialEnded("loading it", code, words)

    def wait_until_run(self) -> None:
        """Returns when the first run has ended, or has taken long. Raises TrialEnded."""
        try:
            message = self._receive(RUN_SECONDS + _SPARE)
        except Timeout:
            return
        if message[0] == "ended":
            raise TrialEnded("its first run", *message[1:])

    def _receive(self, timeout: float) -> list[Any]:
        try:
            message = self._channel.receive(timeout)
        except (PeerDied, Malformed) as error:
            raise GeneralFailure("the device can try no more model files: start it again") from error
        message.close()
        return message.body

    def close(self) -> None:
        self._channel.close()


class TrialServer:
    """Begins trials. Any thread."""

    def __init__(self, device: Device) -> None:
        """Forks the server. No thread may exist but this one, and numpy's, which survive forks."""
        near, far = Channel.pair()
        gc.freeze()
        with warnings.catch_warnings(), far:
            warnings.simplefilter("ignore", DeprecationWarning)
            if not os.fork():
                _become_server(device, far)
        self._channel = near

    def begin(self, fds: Sequence[int], where: Sequence[Any], preference: Preference, *, gives_way: bool) -> Trial:
        """Loads the model in these descriptors, which stay the caller's, and runs it. Raises GeneralFailure."""
        near, far = Channel.pair()
        trial = Trial(near)
        try:
            with far:
                self._channel.send([], [far.fileno()])
            near.send([where, preference, gives_way], fds)
        except PeerDied as error:
            trial.close()
            raise GeneralFailure("the device can try no more model files: start it again") from error
        return trial


# ---- the server process


class _Child(NamedTuple):
    pid: int
    pidfd: int
    channel: Channel
    words: int  #: a memfd, its standard error


def _become_server(device: Device, channel: Channel) -> None:
    try:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        _close_all_but(channel.fileno())
        _serve(device, channel)
    except PeerDied:
        os._exit(0)
    finally:
        os._exit(1)


def _close_all_but(*fds: int) -> None:
    """Closes all descriptors beside standard input, output and error."""
    first = _STDERR + 1
    for fd in sorted(fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _LAST_FD)


def _serve(device: Device, channel: Channel) -> None:
    """Raises PeerDied when the service is gone."""
    poll, children = select.poll(), dict[int, _Child]()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == channel.fileno():
                child = _forked(device, Channel.from_fd(take_fd(channel.receive())))
                children[child.pidfd] = children[child.channel.fileno()] = child
                poll.register(child.pidfd, select.POLLIN)
                poll.register(child.channel, 0)  # the hang-up of the service
            elif fd in children:  # and not ended by an event just before
                child = children.pop(fd)
                poll.unregister(fd)
                if fd != child.pidfd:
                    os.kill(child.pid, signal.SIGKILL)
                    continue
                if children.pop(child.channel.fileno(), None):
                    poll.unregister(child.channel)
                _bury(child)


def _forked(device: Device, channel: Channel) -> _Child:
    words = os.memfd_create("words", os.MFD_CLOEXEC)
    pid = os.fork()
    if not pid:
        try:
            os.dup2(words, _STDERR)
            _close_all_but(channel.fileno())
            _try(device, channel)
        finally:
            os._exit(0)
    return _Child(pid, os.pidfd_open(pid), channel, words)


def _bury(child: _Child) -> None:
    """Tells how the child has ended, unless it had done all."""
    _, status = os.waitpid(child.pid, 0)
    size = os.fstat(child.words).st_size
    raw = os.pread(child.words, 4 * _MOST_WORDS, max(0, size - 4 * _MOST_WORDS))
    words = " ".join("".join(c if c.isprintable() else " " for c in raw.decode(errors="replace")).split())
    with suppress(PeerDied):
        child.channel.send(["ended", os.waitstatus_to_exitcode(status), words[-_MOST_WORDS:]])
    child.channel.close()
    os.close(child.pidfd)
    os.close(child.words)


# ---- the process of one trial


def _try(device: Device, channel: Channel) -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is the one to end
    message = channel.receive()
    where, preference, gives_way = message.body
    if gives_way:
        give_way()
    try:
        region = sealed(message.take_fds(), where)
        seconds = LOAD_SECONDS + LOAD_SECONDS * region.nbytes // 10**9
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        model = decode(region, where[:2])
        prepared = device.prepare(model, Preparation(preference))
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the answer)
        reply, status = failure(error)
        channel.send(["refused", int(status), *reply.values])
        return
    channel.send(["loaded"])
    timer = threading.Timer(RUN_SECONDS, _pass, [channel])
    timer.daemon = True
    timer.start()
    with suppress(Exception):  # an error is an answer: only the end of the process is not
        run_once(prepared, model)
    _pass(channel)


def _pass(channel: Channel) -> None:
    """Ends the process; from any thread, while a run goes on, too."""
    with suppress(PeerDied):
        channel.send(["done"])
    os._exit(0)


def run_once(prepared: PreparedModel, model: Model) -> None:
    """Runs a model on zeros; sizes that it leaves open are 1. Raises what the device raises."""
    graph = model.main
    inputs = [_zeros(graph.operands[i]) for i in graph.inputs]
    outputs = [np.empty(0, np.uint8) for _ in graph.outputs]
    bound = prepared.bind(inputs, outputs, BindOptions(RUN_SECONDS))
    if any(not is_sufficient for _, is_sufficient in bound.shapes):
        pairs = zip(bound.shapes, (graph.operands[i] for i in graph.outputs), strict=True)
        sizes = [math.prod(shape) * operand.type.element_size for (shape, _), operand in pairs]
        if sum(sizes) > _MOST_BYTES:
            return
        bound = prepared.bind(inputs, [np.empty(size, np.uint8) for size in sizes], BindOptions(RUN_SECONDS))
    bound.run()


def _zeros(operand: Operand) -> NDArray[Any]:
    shape = [size or 1 for size in operand.dimensions]
    if math.prod(shape) * operand.type.element_size > _MOST_BYTES:
        raise MemoryError
    return np.zeros(shape, operand.type.dtype)


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
