"""The safety net: what a device fails to do is done by the CPU in this process, with the same result.

Only what another device might do better is done again. An output that is too small, an argument that is wrong and a
deadline that has passed are the same everywhere, and go to the caller. Every fallback is counted, and logged once for
each device and kind.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    BuffersLost,
    DeviceBuffer,
    ErrorStatus,
    PeerDied,
    Result,
    StatusError,
)
from burst.errors import status_error
from driver.client.session import FAILURES
from driver.options import ExecuteOptions
from driver.runtime.local import LocalDevice, LocalPrepared
from driver.runtime.places import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from burst import Request
    from driver.nn import Model
    from driver.options import Preference

_log = logging.getLogger("driver.runtime")
_FINAL = frozenset(
    {
        ErrorStatus.NONE,
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
        ErrorStatus.INVALID_ARGUMENT,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT,
        ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    }
)


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed elsewhere."""
    if isinstance(error, StatusError):
        return error.status not in _FINAL
    return isinstance(error, FAILURES) and not isinstance(error, BuffersLost)


class Fallbacks:
    """Counts of one compiled model, by kind: `_WORDS` has them all. Any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def note(self, kind: str, device: str, error: BaseException) -> None:
        """One more."""
        reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._counts[kind] += 1
            is_first = (kind, device) not in self._last
            self._last[kind, device] = reason
        if is_first:
            _log.warning("device %r failed (%s); %s", device, reason, _WORDS[kind])

    def report(self) -> dict[str, Any]:
        """How often, and why last."""
        with self._lock:
            reasons = {f"{kind}, {device}": reason for (kind, device), reason in self._last.items()}
            return {kind: self._counts[kind] for kind in _WORDS} | {"reasons": reasons}


_WORDS = {
    "dropped": "nothing is compiled for it",
    "compile": "the whole model runs on the CPU in this process",
    "step": "its part of the model was executed on the CPU in this process",
    "whole": "the whole model was executed on the CPU in this process",
}


class CpuFallback:
    """The CPU in the place of one device, for one model: made ready there when it is first needed."""

    def __init__(self, model: Model, preference: Preference, kind: str, device: str, fallbacks: Fallbacks) -> None:
        self._model, self._preference = model, preference
        self._kind, self._device, self._fallbacks = kind, device, fallbacks
        self._lock = threading.Lock()
        self._prepared: LocalPrepared | None = None

    def take_over(self, error: BaseException) -> LocalPrepared:
        """What executes instead, after a failure that is counted here."""
        self._fallbacks.note(self._kind, self._device, error)
        return self.prepared

    def report(self) -> dict[str, Any]:
        """All fallbacks of the compiled model."""
        return self._fallbacks.report()

    @property
    def prepared(self) -> LocalPrepared:
        """The model on the CPU."""
        with self._lock:
            if self._prepared is None:
                self._prepared = LocalDevice().prepare(self._model, preference=self._preference)
            return self._prepared


class FallbackModel:
    """A prepared model on a device, with the CPU behind it. When the device has died, the CPU takes its place."""

    def __init__(self, prepared: Any, fallback: CpuFallback | None) -> None:
        """`prepared`: remote, local or in steps. `fallback`: None where nothing may fall back."""
        self.prepared, self.fallback = prepared, fallback
        self.is_replaced = False

    def run(self, *arrays: Any, timeout: float | None = None) -> tuple[NDArray[Any], ...]:
        """As `RemotePreparedModel.run`."""
        try:
            return self.prepared.run(*arrays, timeout=timeout)  # type: ignore[no-any-return]
        except FAILURES as error:
            return self.replacement(error).run(*arrays, timeout=timeout)

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """As `RemotePreparedModel.execute`. A request on buffers of the device does not fall back."""
        options = ExecuteOptions(measure, timeout, loop_timeout, deadline)
        is_bound = any(isinstance(pool, DeviceBuffer) for pool in request.pools)
        failure: BaseException
        try:
            result: Result = self.prepared.execute(request, *options)
            graph = self.prepared.model.main
            check_shapes([graph.operands[i] for i in graph.outputs], result.output_shapes)
            if not self._can_move or is_bound or result.status in _FINAL:
                return result
            failure = status_error(result.status, result.message)
        except FAILURES as error:
            if is_bound:
                raise
            failure = error
        return self.replacement(failure).execute(request, *options)

    @property
    def _can_move(self) -> bool:
        return self.fallback is not None and not self.is_replaced

    def replacement(self, error: BaseException) -> LocalPrepared:
        """What executes after that failure. Raises it when there is nothing, or it would only fail again."""
        if self.fallback is None or not self._can_move or not is_retryable(error):
            raise error
        fallback = self.fallback.take_over(error)
        if isinstance(error, PeerDied):
            self.prepared, self.is_replaced = fallback, True
        return fallback

    def burst_replacement(self, error: BaseException) -> LocalPrepared:
        """The same for a burst of the device, which may outlive its place here."""
        if self.fallback and self.is_replaced and is_retryable(error):
            return self.fallback.take_over(error)
        return self.replacement(error)


class BurstFallback(NamedTuple):
    """What a burst of a compiled model does about requests that its device does not answer."""

    replacement: Callable[[BaseException], LocalPrepared]  #: `FallbackModel.burst_replacement`
    report: Callable[[], dict[str, Any]]  #: all fallbacks of the compiled model
