"""Trials of model files: the first load and the first run of a file happen in a process that is thrown away.

A file can hit a defect of the runtime that reads it, and end the process that the runtime is in. So a file that the
device has not seen yet is loaded, and run once on zeros, in a process of its own, before the engine loads it.

The fork server (`driver.service.fork_server`) makes that process, with the runtime in memory, and tells how it ended.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, GeneralFailure, Malformed, PeerDied, ResourceExhaustedTransient, Timeout
from burst.errors import status_error
from burst.run_queue import give_way
from driver.deadlines import overdue, passed, seconds_left
from driver.errors import signal_name
from driver.interface import BindOptions, Preparation
from driver.nn import OutputInsufficientSize
from driver.protocol.model_codec import decode, sealed
from driver.protocol.rpc import failure
from driver.service.fork_server import ForkServer
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from burst.channel import Channel
    from driver.interface import Device, PreparedModel
    from driver.nn import Model, Operand
    from driver.options import Preference

    Fill = Callable[[list[int], np.dtype[Any]], NDArray[Any]]

LOAD_SECONDS = 60
"""Of processor time that a file may take to load; another such time for each gigabyte."""

RUN_SECONDS = 1.0
"""After so much of its first run a file has passed."""

UNPROVOKED = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from outside, or for lack of memory."""

_PATIENCE = 600.0  # seconds that a file may take to load, whatever it waits for
_SPARE = 10.0  # seconds beyond RUN_SECONDS for a busy machine
_TOGETHER = 4  # trials of an account
_MOST_BYTES = 1 << 30  # of arguments of the first run


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
        """Wait until the file is loaded. `deadline`: CLOCK_MONOTONIC ns.

        Raise TrialEnded; the StatusError that stands for what the device raised; MissedDeadlineTransient.
        """
        left = seconds_left(deadline)
        try:
            message = self._receive(_PATIENCE if left is None else min(left, _PATIENCE))
        except Timeout:
            if passed(deadline):
                raise overdue("preparing", deadline or 0) from None
            raise GeneralFailure(f"the model file was not loaded within {_PATIENCE:g} s, in a trial") from None
        if message[0] == "ended":
            raise TrialEnded("loading it", *message[1:])

    def wait_until_run(self) -> None:
        """Wait until the first run has ended, or has taken long. Raise TrialEnded, ResourceExhausted*."""
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
        match message.body:
            case ["refused", int(status), str(text), *_]:
                raise status_error(ErrorStatus(status), text)
        return message.body

    def send(self, body: list[Any], fds: Sequence[int]) -> None:
        """Say what to try. Raise PeerDied."""
        self._channel.send(body, fds)

    def close(self) -> None:
        self._channel.close()


class TrialPlaces:
    """Places for the trials of one account: for several together, or for one that is alone. Any thread."""

    def __init__(self) -> None:
        self._next_alone, self._places = threading.Semaphore(), threading.Semaphore(_TOGETHER)

    @contextmanager
    def held(self, deadline: int | None, *, alone: bool) -> Iterator[None]:
        """Hold a place meanwhile, or all of them. Raise MissedDeadlineTransient."""
        needed = [self._next_alone, *[self._places] * _TOGETHER] if alone else [self._places]
        with ExitStack() as held:
            for place in needed:
                if not place.acquire(timeout=seconds_left(deadline)):
                    raise overdue("queued", deadline or 0)
                held.callback(place.release)
            yield


class PatientTrial(Closing):
    """A trial that takes place once more, alone, if it is ended for the memory that several took together.

    So what a file needs decides whether it passes, and not what others load at the same time.
    """

    def __init__(self, begin: Callable[[], Trial], places: TrialPlaces, deadline: int | None) -> None:
        """Begin nothing yet. `deadline`: CLOCK_MONOTONIC ns."""
        self._begin, self._places, self._deadline = begin, places, deadline
        self._held, self._is_alone = ExitStack(), False

    def wait_until_loaded(self) -> None:
        """Wait for a place, and for the trial, as `Trial.wait_until_loaded` does."""
        try:
            self._load()
        except ResourceExhaustedTransient:
            self._is_alone = True
            self._load()

    def wait_until_run(self) -> None:
        """Wait, as `Trial.wait_until_run` does; also raise what `wait_until_loaded` raises."""
        try:
            self._trial.wait_until_run()
        except ResourceExhaustedTransient:
            if self._is_alone:
                raise
            self._is_alone = True
            self._load()
            self._trial.wait_until_run()

    def _load(self) -> None:
        self._held.close()
        self._held.enter_context(self._places.held(self._deadline, alone=self._is_alone))
        self._trial = self._held.enter_context(self._begin())
        self._trial.wait_until_loaded(self._deadline)

    def close(self) -> None:
        self._held.close()


class TrialServer:
    """Begins trials. Any thread."""

    def __init__(self, device: Device, most: int) -> None:
        """Fork the server, as `ForkServer` does."""
        self._server = ForkServer(device, partial(_try, device), most)

    def begin(self, fds: Sequence[int], where: Sequence[Any], preference: Preference, *, gives_way: bool) -> Trial:
        """Load the model in these descriptors, which stay the caller's, and run it. Raise GeneralFailure."""
        try:
            trial = Trial(self._server.begin())
        except PeerDied as error:
            raise GeneralFailure("the device can try no more model files: start it again") from error
        try:
            trial.send([where, preference, gives_way], fds)
        except PeerDied as error:
            trial.close()
            raise GeneralFailure("the device can try no more model files: start it again") from error
        return trial


# ---- the process of one trial


def _try(device: Device, channel: Channel) -> None:
    message = channel.receive()
    where, preference, gives_way = message.body
    if gives_way:
        give_way()
    try:
        region = sealed(message.take_fds(), where)
        seconds = LOAD_SECONDS + LOAD_SECONDS * region.nbytes // 10**9
        if not 0 <= resource.getrlimit(resource.RLIMIT_CPU)[1] <= seconds:
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
    """End the process; from any thread, while a run goes on, too."""
    with suppress(PeerDied):
        channel.send(["done"])
    os._exit(0)


def run_once(prepared: PreparedModel, model: Model, fill: Fill = np.zeros, loop_timeout: float = RUN_SECONDS) -> None:
    """Run a model on zeros, or what `fill` makes; sizes that it leaves open are 1. Raise what the device raises."""
    graph = model.main
    inputs, options = [_filled(graph.operands[i], fill) for i in graph.inputs], BindOptions(loop_timeout)
    sizes = [graph.operands[i].type.element_size for i in graph.outputs]
    shapes = prepared.bind(inputs, [np.empty(0, np.uint8) for _ in sizes], options).shapes
    while True:
        room = [math.prod(shape) * size for (shape, _), size in zip(shapes, sizes, strict=True)]
        if sum(room) > _MOST_BYTES:
            return
        try:
            prepared.bind(inputs, [np.empty(nbytes, np.uint8) for nbytes in room], options).run()
        except OutputInsufficientSize as error:  # what was open is known now
            if error.shapes == shapes:
                raise
            shapes = error.shapes
        else:
            return


def _filled(operand: Operand, fill: Fill) -> NDArray[Any]:
    shape = [size or 1 for size in operand.dimensions]
    if math.prod(shape) * operand.type.element_size > _MOST_BYTES:
        raise MemoryError
    return fill(shape, operand.type.dtype)
