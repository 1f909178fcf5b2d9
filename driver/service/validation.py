"""Decodes and validates the models that clients send, and asks the device about them: all that takes time in Python.

Each account's models are validated in a thread of its own, for no longer than `validate_seconds` of a processor. The
threads have low priority, so that they take no processor from a listener: Linux priorities are per thread.
"""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from burst import ResourceExhaustedPersistent
from burst.channel import close_all
from burst.memory import KINDS
from burst.run_queue import give_way
from driver.deadlines import check, overdue, passed, seconds_left
from driver.engine.account_threads import AccountThreads
from driver.engine.limits import or_raise
from driver.nn.file_form import FILE, is_file
from driver.nn.known import explained
from driver.protocol.model_codec import decode_valid, operations_on, sealed
from driver.service.support_query import SupportQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.engine.limits import Limits
    from driver.interface import Device
    from driver.nn import Model
    from driver.protocol.model_memory import SealedModel

NOT_YOURS = (
    "this device serves several accounts, and runs model files for its own account alone: a file that crashes its "
    'runtime, or takes it over, would do so to the others; load it with form="operations", or use a device of your own'
)
_LARGE = 1 << 20  # bytes of a model whose memory is looked after
_THREADS = 8  # accounts whose models are validated at once


class Explained(NamedTuple):
    """The findings about a valid model. The model itself, which may be large, is not kept while it is prepared."""

    reasons: list[str | None]  #: of each operation why the device does not support it
    refused: str  #: the type of the first one that it does not support; "": there is none
    file: Model | None  #: the model, if it is a file, and so has one operation

    @classmethod
    def of(cls, model: Model, reasons: list[str | None]) -> Self:
        """Return what these reasons say of the model."""
        types = (operation.type for operation, why in zip(model.main.operations, reasons, strict=False) if why)
        return cls(reasons, next(types, ""), model if is_file(model) else None)


class ValidationBudget:
    """The processor time that the validation of one model may take: what paces it."""

    def __init__(self, limits: Limits, deadline: int | None) -> None:
        self.seconds = 0.0  #: used so far
        self.deadline = deadline  #: CLOCK_MONOTONIC nanoseconds; None: none
        self._most, self._begin = limits.validate_seconds, 0.0

    def begin(self) -> None:
        """Begin the validation, in this thread."""
        self._begin = time.thread_time()

    def end(self) -> None:
        """End the validation."""
        self.seconds = time.thread_time() - self._begin

    def __call__(self) -> None:
        """Raise ResourceExhaustedPersistent once the time is used up, and MissedDeadlineTransient."""
        self.end()
        if self.deadline is not None:
            check("preparing", self.deadline)
        if self.seconds > self._most:
            raise ResourceExhaustedPersistent(
                f"validating this model takes more than validate_seconds = {self._most:g} s of a processor; prepare a "
                f"smaller model{or_raise('validate_seconds')}"
            )


class Validator:
    """Validates for one device. Any thread."""

    def __init__(self, device: Device, limits: Limits, extensions: Callable[[int], Sequence[str]]) -> None:
        """Forks if the device is asked apart: no thread may exist yet. `extensions`: that an account may use."""
        self._device, self._limits, self._extensions = device, limits, extensions
        self._query = SupportQuery(device, limits.driver_seconds) if device.asked_apart else None
        self._threads = AccountThreads("validation", _THREADS, give_way)

    def explained(self, uid: int, fds: list[int], where: object, budget: ValidationBudget) -> Explained:
        """Validate a model of that account's. Owns `fds`.

        Raises InvalidModel; MissedDeadline* if it is not done by the deadline; ResourceExhausted*.
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
        raise overdue("queued" if was_queued else "preparing", deadline or 0)

    def _explained_and_gone(self, uid: int, fds: list[int], where: object, budget: ValidationBudget) -> Explained:
        """Nothing of a large model is kept: a device may leave it in a reference cycle when it explains it."""
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
        budget.begin()
        try:
            own += [os.dup(fd) for fd in fds] if self._query else []
            memory = sealed(fds, where)
            sizes.append(memory.nbytes)
            self._limits.check_size("client_bytes", sum(memory.occupied.values()), "prepare a smaller model")
            model, extensions = decode_valid(memory, where, budget), self._extensions(uid)
            if is_file(model) and FILE.name not in extensions:
                return Explained.of(model, [NOT_YOURS])
            if self._query:
                reasons = self._query.explain(uid, own, where, extensions, count=len(model.main.operations))
            else:
                reasons = explained(model, extensions, self._device.explain)
            return Explained.of(model, self._with_memory(model, memory, reasons))
        finally:
            budget.end()
            close_all(own)

    def _with_memory(self, model: Model, memory: SealedModel, reasons: list[str | None]) -> list[str | None]:
        """Return the reasons, and that of operations on constants in memory that the device cannot read."""
        device = self._device
        kinds = KINDS.keys() if device.memory_kinds is None else device.memory_kinds
        unreadable = {part.kind for part in memory.parts if part.kind} - kinds
        if not unreadable or len(reasons) != len(model.main.operations):
            return reasons
        refused = operations_on(model, lambda value: memory.kind_at(value.ctypes.data) in unreadable)
        why = f"it reads a constant in memory of a kind that the device cannot read; {', '.join(kinds)} it can"
        return [reason or (why if is_refused else None) for reason, is_refused in zip(reasons, refused, strict=True)]
