"""One burst of a client as the engine sees it, whether the engine serves it or the device's driver does.

A driver may return a burst of its own from `PreparedModel.configure_execution_burst`. The engine does not trust it: an
exception, or anything else that is no burst, is the client's error and names the driver, and a burst that does not end
is given up.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from burst import ExecutionBurst, ExecutionBurstServer, GeneralFailure, Malformed, StatusError
from burst.errors import status_error
from burst.exhaustion import exhausted
from burst.serving_thread import ServingThread
from burst.slots import checked_slots
from burst.trace import blamed
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from burst import BurstOffer, Trace
    from burst.channel import Channel, Message
    from driver.interface import PreparedModel
    from fmq import LifePage

_log = logging.getLogger(__name__)
GRACE = 5.0
"""Seconds that a burst of the driver's own may go on after it was stopped; then the engine counts it as ended."""


class OpenBurst:
    """A burst, its context and its trace. Any thread may call its methods."""

    def __init__(self, device: str, context: Channel, trace: Trace, life: LifePage) -> None:
        self._device, self.context, self.trace, self._life = device, context, trace, life
        self._burst: ExecutionBurst | None = None
        self._callback: Channel | None = None
        self._on_end: Callable[[OpenBurst], object] | None = None
        self._timer: threading.Event | None = None  #: set when it has ended within GRACE
        self._lock, self._is_ended = threading.RLock(), False

    def configure(self, offer: BurstOffer, prepared: PreparedModel, versions: Collection[int]) -> int:
        """Serve the offer, whose `on_end` is `ended`, with the driver's own burst; or with the engine's server.

        The engine serves if the driver has none. `versions`: of the wire, that the client speaks, too. Returns the
        version of the burst.

        Raise StatusError; then the callback is still the caller's.
        """
        try:
            burst: object = None
            if version := max({*versions} & {*prepared.burst_versions}, default=0):
                with blamed(self.trace):
                    burst = prepared.configure_execution_burst(replace(offer, version=version))
            if burst is None:
                version, burst = offer.version, ExecutionBurstServer.create(offer)
        except FmqError as error:
            raise GeneralFailure(f"the burst's queues cannot be used: {error}") from error
        except StatusError as error:
            words = self._words(f"cannot serve this burst: {error}")
            raise status_error(error.status, words, error.as_cause()) from error
        except Exception as error:
            raise self._failed("configure a burst", error) from error
        if not isinstance(burst, ExecutionBurst):
            raise GeneralFailure(
                self._words(f"configure_execution_burst returned {burst!r:.80}; return an ExecutionBurst, or None")
            )
        self._burst, self._callback = burst, offer.callback
        return version

    def start(self, register: Callable[[], object], on_end: Callable[[OpenBurst], object]) -> None:
        """Call `register`, and begin to serve.

        `on_end` is called once, when the burst has ended, also if `register` fails on the way.

        Raise GeneralFailure.
        """
        burst = self._burst
        assert burst
        try:
            with self._lock:
                was_over = self._is_ended
                if not was_over:
                    self._on_end = on_end
                    register()
            if not was_over:
                burst.start()
        except Exception as error:
            self.stop()
            self.ended()
            raise self._failed("start a burst", error) from error
        if was_over:
            self._burst = None
            self._tell("stop", burst.stop)
            raise GeneralFailure(self._words("said that this burst had ended before it began"))

    def stop(self) -> None:
        """End the burst; a running execution may finish first."""
        burst = self._burst
        if burst is None:
            return
        if not isinstance(burst, ExecutionBurstServer):  # that one is known to end
            self._begin_grace()
        self._tell("stop", burst.stop)
        self._life.close()

    def on_message(self, message: Message) -> None:
        """Handle a message of the context. Raise Malformed."""
        match message.body:
            case ["free_memory", *slots]:
                self._free_memory(checked_slots(slots))
            case _:
                raise Malformed("the only message of a context is free_memory(slots)")

    def forget_plans(self) -> None:
        """Have requests bound anew: what they were bound to has changed."""
        if burst := self._burst:
            self._tell("forget_plans", burst.forget_plans)

    @property
    def answered(self) -> int:
        """The number of requests answered so far."""
        burst = self._burst
        return _number(lambda: burst.answered) if burst else 0

    @property
    def bound(self) -> int:
        """The number of requests that the burst remembers."""
        burst = self._burst
        if isinstance(burst, ExecutionBurstServer):  # that one is known to count
            return burst.bound
        return _number(lambda: burst.bound) if burst else 0

    def ended(self) -> None:
        """Note that the burst has ended and freed everything. Later calls do nothing."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            # No garbage is collected while another burst is open, so there must be no cycles.
            on_end, self._on_end, self._burst = self._on_end, None, None
            timer, self._timer = self._timer, None
        if timer:
            timer.set()
        self._life.close()  # before the context, whose end alone would mean that this process has died
        if self._callback:
            self._callback.close()
        if on_end:
            on_end(self)

    def _free_memory(self, slots: Iterable[int]) -> None:
        burst = self._burst
        if burst is not None and not self._tell("free_memory", burst.free_memory, slots):
            self.stop()  # it may hold the memory

    def _begin_grace(self) -> None:
        with self._lock:
            if self._timer or self._is_ended:
                return
            self._timer = timer = threading.Event()
            try:
                ServingThread(self._bound_end, timer, name="burst-grace").start()
            except RuntimeError:  # the burst is not given up; it ends when the driver ends it
                _log.warning("%s", self._words("has no thread that bounds the end of a burst"))

    def _bound_end(self, has_ended: threading.Event) -> None:
        if has_ended.wait(GRACE):
            return
        _log.error("%s", self._words(f"has not ended a burst within {GRACE:g} s of stop(): it never called on_end"))
        self.ended()

    def _tell(self, what: str, call: Callable[..., object], *arguments: Any) -> bool:
        """Call the burst; False: it raised."""
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 (one bad burst must not end a thread that serves many)
            _log.exception("%s", self._words(f"raised in {what} of a burst"))
            return False
        return True

    def _failed(self, what: str, error: Exception) -> StatusError:
        if found := exhausted(error):
            return found
        _log.error("%s", self._words(f"failed to {what}"), exc_info=error)
        return GeneralFailure(self._words(f"failed to {what}: {type(error).__name__}: {error}"))

    def _words(self, what: str) -> str:
        return f"device {self._device!r} {what}"


def _number(count: Callable[[], int]) -> int:
    """Return what a driver's burst counts; 0 where that raises anything, or is no number."""
    with suppress(Exception):
        return int(count())
    return 0
