"""Decodes and validates the models that clients send, and asks the device about them: all that takes time in Python.

Each account's models are validated in a thread of its own, for no longer than `validate_seconds` of a processor. The
threads have low priority, so that they take no processor from a listener: Linux priorities are per thread.
"""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from burst import GeneralFailure, InvalidArgument, PeerDied, ResourceExhaustedPersistent
from burst.channel import close_all
from burst.memory import KINDS
from burst.run_queue import give_way
from driver.deadlines import begin_work, check, due, overdue, passed, seconds_left
from driver.engine.account_threads import AccountThreads
from driver.engine.limits import or_raise
from driver.engine.preparations import PreparationEstimates, PreparationTime
from driver.nn.file_form import FILE, is_file
from driver.nn.known import explained
from driver.protocol.model_codec import decode_valid, operations_on, sealed
from driver.service.preparation_times import key_of, structure_of
from driver.service.support_query import SupportQuery
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from burst import StatusError
    from driver.engine.limits import Limits
    from driver.interface import Device
    from driver.nn import Model
    from driver.protocol.model_memory import SealedModel
    from driver.service.preparation_times import PreparationTimes

NOT_YOURS = (
    "this device serves several accounts, and runs model files for its own account alone: a file that crashes its "
    'runtime, or takes it over, would do so to the others; load it with form="operations", or use a device of your own'
)
_LARGE = 1 << 20  # bytes of a model whose memory is looked after
_THREADS = 8  # accounts whose models are validated at once
_LOOK = 0.01  # seconds of a processor between two looks whether the client is still there


class Explained(NamedTuple):
    """The findings about a valid model. The model itself, which may be large, is not kept while it is prepared."""

    reasons: list[str | None]  #: of each operation why the device does not support it
    first: int | None  #: that it does not support: of those on memory that it cannot decode, if there are any
    type: str  #: of that operation
    is_undecodable: bool  #: whether that is for such memory
    file: Model | None  #: the model, if it is a file, and so has one operation
    structure: bytes  #: `structure_of` the model

    @classmethod
    def of(cls, model: Model, reasons: list[str | None], structure: bytes, undecodable: Iterable[int] = ()) -> Self:
        """Return what these reasons say of the model. `undecodable`: operations on memory that cannot be decoded."""
        first = min(undecodable, default=None)
        is_undecodable = first is not None
        if first is None:
            first = next((n for n, why in enumerate(reasons) if why is not None), None)
        kind = "" if first is None or first >= len(model.main.operations) else model.main.operations[first].type
        file = model if is_file(model) else None
        return cls(reasons, first, kind, is_undecodable=is_undecodable, file=file, structure=structure)

    def check(self) -> None:
        """Raise GeneralFailure if the device cannot decode the memory of a constant, as the HAL recommends;
        InvalidArgument if it does not support an operation for another reason.
        """
        if self.first is None:
            return
        kind, more = (
            GeneralFailure if self.is_undecodable else InvalidArgument,
            sum(why is not None for why in self.reasons) - 1,
        )
        others = f"; nor {'is one other' if more == 1 else f'are {more} others'}" if more else ""
        raise kind(f"operation {self.first} ({self.type}) is not supported: {self.reasons[self.first]}{others}")


class ValidationBudget:
    """The processor time that the validation of one model may take: what paces it.

    A validation whose client has left ends: the account's next one waits for it.
    """

    def __init__(self, limits: Limits, deadline: int | None, has_left: Callable[[], bool]) -> None:
        """`has_left`: whether the client has; any thread may ask."""
        self._has_left, self._look_at = has_left, 0.0
        self.seconds = 0.0  #: used so far
        self.deadline = deadline  #: CLOCK_MONOTONIC nanoseconds; None: none
        self._most, self._begin = limits.validate_seconds, 0.0
        self._made, self._waited = clock.now(), 0

    def begin(self) -> None:
        """Begin the validation, in this thread. Raise PeerDied."""
        self._begin, self._waited = time.thread_time(), clock.now() - self._made
        self._check_client()

    def begin_work(self) -> None:
        """Note in this thread when the validation was asked for, and how long it has waited for others since."""
        begin_work(self._made, self._waited)

    def end(self) -> None:
        """End the validation."""
        self.seconds = time.thread_time() - self._begin

    def overdue(self) -> StatusError:
        """Return the error of a validation that has begun and is not done by its deadline; any thread."""
        self.begin_work()
        return overdue("preparing", self.deadline or 0)

    def __call__(self) -> None:
        """Raise ResourceExhaustedPersistent once the time is used up, MissedDeadline*, and PeerDied."""
        self.end()
        if self.seconds >= self._look_at:
            self._check_client()
        if self.deadline is not None:
            check("preparing", self.deadline)
        if self.seconds > self._most:
            raise ResourceExhaustedPersistent(
                f"validating this model takes more than validate_seconds = {self._most:g} s of a processor; prepare a "
                f"smaller model{or_raise('validate_seconds')}"
            )

    def _check_client(self) -> None:
        self._look_at = self.seconds + _LOOK
        if self._has_left():
            raise PeerDied("the client has left: nobody waits for this model")


class Validator:
    """Validates for one device. Any thread."""

    def __init__(
        self, device: Device, limits: Limits, times: PreparationTimes, extensions: Callable[[int], Sequence[str]]
    ) -> None:
        """Fork if the device is asked apart: no thread may exist yet. `extensions`: that an account may use."""
        self._device, self._limits, self._extensions = device, limits, extensions
        self._times, self._estimates = times, PreparationEstimates()
        self._query = SupportQuery(device, limits.driver_seconds, limits.engine_most(1)) if device.asked_apart else None
        self._threads = AccountThreads("validation", _THREADS, give_way)

    def explained(self, uid: int, fds: list[int], where: object, budget: ValidationBudget) -> Explained:
        """Validate a model of that account's. Owns `fds`.

        Raise InvalidModel; MissedDeadline* if it is not done by the deadline; ResourceExhausted*; PeerDied if the
        client has left.
        """
        deadline = budget.deadline
        try:
            if found := passed(deadline):
                found.raise_for_status()
            future = self._threads.submit(uid, partial(self._explained_and_gone, uid, fds, where, budget))
        except BaseException:
            close_all(fds)
            raise
        if wait([future], seconds_left(deadline)).done:
            try:
                return future.result()
            finally:
                del future  # its error knows this frame
        was_queued = future.cancel()
        if was_queued:
            close_all(fds)
        raise overdue("queued", deadline or 0) if was_queued else budget.overdue()

    def _explained_and_gone(self, uid: int, fds: list[int], where: object, budget: ValidationBudget) -> Explained:
        """Explain, and keep nothing of a large model: a device may leave it in a reference cycle."""
        sizes = list[int]()
        try:
            return self._explained(uid, fds, where, budget, sizes=sizes)
        finally:
            if sum(sizes) >= _LARGE:
                gc.collect()

    def _explained(
        self, uid: int, fds: list[int], where: object, budget: ValidationBudget, sizes: list[int]
    ) -> Explained:
        """`sizes`: gets the bytes of the model."""
        own: list[int] = []
        try:
            budget.begin()
            own += [os.dup(fd) for fd in fds] if self._query else []
            memory = sealed(fds, where)
            sizes.append(memory.nbytes)
            self._limits.check_size("client_bytes", sum(memory.occupied.values()), "prepare a smaller model")
            structure = structure_of(memory, where)
            with due(budget.deadline), self._known(uid, structure, budget):
                model, extensions = decode_valid(memory, where, budget), self._extensions(uid)
                if is_file(model) and FILE.name not in extensions:
                    return Explained.of(model, [NOT_YOURS], structure)
                if self._query:
                    reasons = self._query.explain(uid, own, where, extensions, count=len(model.main.operations))
                else:
                    reasons = explained(model, extensions, self._device.explain, self._device.hal_version)
                refused = self._undecodable(model, memory) if len(reasons) == len(model.main.operations) else {}
                reasons = [refused.get(n, reason) for n, reason in enumerate(reasons)]
                return Explained.of(model, reasons, structure, refused)
        finally:
            budget.end()
            close_all(fds)  # unless `sealed` has
            close_all(own)

    @contextmanager
    def _known(self, uid: int, structure: bytes, budget: ValidationBudget) -> Iterator[None]:
        """Measure a validation. Raise MissedDeadline* if it has never been done in the time that is left."""
        budget.begin_work()
        key = key_of(uid, None, structure)
        known = 0 if budget.deadline is None else self._times.known(key)
        takes = PreparationTime(key, known)
        with self._estimates.preparing(takes):
            yield
        self._times.note(key, known, takes.found)

    def _undecodable(self, model: Model, memory: SealedModel) -> dict[int, str]:
        """Return, for each operation on a constant in memory of a kind that the device cannot decode, the reason."""
        device = self._device
        kinds = KINDS.keys() if device.memory_kinds is None else device.memory_kinds
        undecodable = {part.kind for part in memory.parts if part.kind} - kinds
        if not undecodable:
            return {}
        refused = operations_on(model, lambda value: memory.kind_at(value.ctypes.data) in undecodable)
        why = (
            f"it reads a constant in memory of kind {' or '.join(sorted(undecodable))}, which the device cannot "
            f"decode: copy it to memory of kind {' or '.join(sorted(kinds))}, or give it as an array"
        )
        return dict.fromkeys((n for n, is_refused in enumerate(refused) if is_refused), why)
