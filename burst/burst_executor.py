"""Serves a burst with an executor of the device's own, which keeps the client's memory by slot (the HAL's second form).

The executor is trusted with the memory, not with the protocol: what it returns is checked before it is encoded.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from burst._core import lib
from burst.adapted import cancel_of
from burst.errors import GeneralFailure, OutputInsufficientSize, Result, status_error
from burst.execution import Execution
from burst.executor import DecodedRequest, Estimates
from burst.messages import NO_CAUSE, Cause, ErrorStatus, OutputShape
from burst.run_queue import FOREVER
from burst.wire import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.execution_burst import BurstExecutorWithCache
    from burst.memory import Memory
    from burst.messages import Request
    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)
_NONE, _SHORT = ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE


class ExecutorCache:
    """The executor's memory by slot, in the place of a `MappingCache`, and the executions on it.

    One lock orders all calls of the executor. The thread that frees slots never waits for it: slots that are freed
    while the executor runs are removed when it has.
    """

    def __init__(self, executor: BurstExecutorWithCache) -> None:
        self._executor, self._lock, self.cancel = executor, threading.Lock(), cancel_of(executor)
        self._added, self._freed = set[int](), list[int]()
        self._fetch: Callable[[list[int]], list[Memory]] | None = None
        self.estimates = Estimates()

    def job(self, packet: RequestPacket) -> DecodedRequest:
        """Return how to bind that request."""
        return DecodedRequest(packet, partial(_ExecutorRun, self, packet.measure))

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> Sequence[int]:
        """Have the executor keep the memory of each slot, and return the slots. All or nothing."""
        self._fetch = fetch
        with self._lock:
            self._add(slots)
        self._remove_freed()
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Remove these slots; now, or after the execution that runs."""
        self._freed.extend(slots)
        self._remove_freed()

    def clear(self) -> None:
        """Remove all slots: the burst is over."""
        with self._lock:
            self._remove(self._added)
            self._added.clear()
            self._freed.clear()
            self._fetch = None

    def execute(self, request: Request, slots: Sequence[int | Token], measure: bool) -> Result:
        """Execute once, and check the result. Raise StatusError, and what the executor raises."""
        due = lib.burst_due()
        try:
            with self._lock:
                self._add([slot for slot in slots if not isinstance(slot, Token)])
                deadline = None if due == FOREVER else due
                found = self._executor.execute(request, slots, measure, deadline, request.loop_timeout)
        finally:
            self._remove_freed()
        return checked_result(found, request)

    def _add(self, slots: Iterable[int]) -> None:
        """Add an entry, under the lock."""
        executor = self._executor
        missing = sorted({slot for slot in slots if not executor.is_cache_entry_present(slot)})
        if not missing:
            return
        assert self._fetch
        memories = self._fetch(missing)
        added = []
        try:
            for slot, memory in zip(missing, memories, strict=True):
                added.append(slot)
                executor.add_cache_entry(slot, memory)
        except BaseException:
            self._remove(added)
            raise
        self._added.update(added)

    def _remove_freed(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):
            try:
                slots = set[int]()
                while self._freed:  # one by one: another thread may add to it meanwhile
                    slots.add(self._freed.pop())
                slots &= self._added
                self._added -= slots
                self._remove(slots)
            finally:
                self._lock.release()

    def _remove(self, slots: Iterable[int]) -> None:
        for slot in sorted(slots):
            try:
                self._executor.remove_cache_entry(slot)
            except Exception:  # noqa: BLE001 (the other slots are to be freed, too)
                _log.exception("an executor failed to remove slot %d", slot)


class _ExecutorRun(Execution):
    """One request, executed by an executor."""

    is_static = False

    def __init__(self, cache: ExecutorCache, measure: bool, request: Request) -> None:
        """Prepare one execution. The pools of the request are slots, and tokens."""
        self._cache, self._slots, self._measure = cache, tuple(request.pools), measure
        self._request = request._replace(pools=())
        self.estimate, self.shapes = cache.estimates.of(request), ()

    def run(self) -> None:
        result = self._cache.execute(self._request, self._slots, self._measure)
        self.shapes = result.output_shapes
        self.time_on_device = result.timing.time_on_device if self._measure else None

    def cancel(self) -> None:
        self._cache.cancel()


def checked_result(found: object, request: Request) -> Result:
    """Return the result of a successful execution, as a client may see it. Raise StatusError for every other one."""
    if not isinstance(found, Result):
        raise GeneralFailure(f"the executor returned {found!r:.80}, not a burst.Result")
    try:
        status = ErrorStatus(found.status)
    except ValueError:
        raise GeneralFailure(f"the executor returned status {found.status!r:.20}, which does not exist") from None
    if status not in {_NONE, _SHORT}:
        cause = found.cause if isinstance(found.cause, Cause) else NO_CAUSE
        raise status_error(status, str(found.message), cause)
    shapes = tuple(_checked_shapes(found.output_shapes, request, status))
    if status is _SHORT:
        raise OutputInsufficientSize(str(found.message), Result(_SHORT, (), shapes))
    return Result(_NONE, (), shapes, found.timing)


def _checked_shapes(shapes: Any, request: Request, status: ErrorStatus) -> list[OutputShape]:
    try:
        found = [OutputShape(tuple(map(index, dimensions)), bool(enough)) for dimensions, enough in shapes]
    except (TypeError, ValueError) as error:
        raise GeneralFailure(f"the executor returned the shapes {shapes!r:.80}, which are none: {error}") from error
    if len(found) != len(request.outputs) and (found or status is _SHORT):
        raise GeneralFailure(f"the executor returned {len(found)} shapes for {len(request.outputs)} outputs")
    if status is (_SHORT if all(shape.is_sufficient for shape in found) else _NONE):
        raise GeneralFailure(f"the executor returned {status.name} and the shapes {found!r:.80}, which say otherwise")
    for n, ((dimensions, _), argument) in enumerate(zip(found, request.outputs, strict=False)):
        if not _fits(dimensions, tuple(argument.dimensions)):
            raise GeneralFailure(
                f"output {n}: the request gives dimensions {list(argument.dimensions)}; the executor returned "
                f"{list(dimensions)}"
            )
    return found


def _fits(dimensions: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Return True if they are numbers on the wire, and those of the request where it gives some."""
    if not all(0 <= d < 2**32 for d in dimensions):
        return False
    return not given or (
        len(given) == len(dimensions) and all(g in {0, d} for g, d in zip(given, dimensions, strict=True))
    )
