"""A burst that the driver's library serves itself, or with a prepared model of its choice: its `configure_burst`,
`free_memory` and `end_burst`, and `burst_offer.serve`.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from burst import DeviceUnavailable, ErrorStatus, ExecutionBurst, ExecutionBurstServer, GeneralFailure
from burst.channel import close_all
from burst.request_binder import request_binder
from driver.devices.library.loaded import write_why
from driver.devices.library.table import ffi
from driver.options import PRIORITIES
from fmq.end import DEFAULT_SPIN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from burst import BurstOffer
    from driver.devices.library.device import LibraryModel
    from fmq import Descriptor

_numbers = itertools.count(1)
_open: dict[int, LibraryBurst] = {}  # by the context that the driver gets; they live until the driver says `ended`


def configured(model: LibraryModel, offer: BurstOffer) -> ExecutionBurst | None:
    """Return the driver's own burst, or one on the prepared model that it names; None: it leaves this one to the
    engine.

    Raise StatusError, and what `ExecutionBurstServer.create` raises.
    """
    number = next(_numbers)
    burst = _open[number] = LibraryBurst(model, offer)
    fds: list[int] = []
    try:
        fds.extend(map(os.dup, (offer.requests.fds[0], offer.results.fds[0], offer.callback.fileno())))
        served = burst.configure(_flat(offer, fds, number))
    except BaseException as error:
        close_all(fds)
        _open.pop(number, None)
        if isinstance(error, DeviceUnavailable):
            return None
        raise
    if served is None:
        return burst
    close_all(fds)
    _open.pop(number, None)
    return ExecutionBurstServer.create(offer, served)


def _flat(offer: BurstOffer, fds: list[int], number: int) -> Any:
    """Return a `burst_offer`."""
    found = ffi.new("burst_offer *", {"size": ffi.sizeof("burst_offer"), "version": offer.version})
    found.request_queue, found.result_queue, found.callback = fds
    found.request_offset, found.request_ring, found.request_elements = _places(offer.requests)
    found.result_offset, found.result_ring, found.result_elements = _places(offer.results)
    spin = DEFAULT_SPIN if isinstance(offer.spin, str) else offer.spin
    found.spin_ns, found.priority = int(spin * 1e9), list[str](PRIORITIES).index(offer.priority)
    found.context, found.ended, found.serve = ffi.cast("void *", number), _on_ended, _on_serve
    return found


def _places(queue: Descriptor) -> tuple[int, int, int]:
    control, ring = queue.grantors[:2]
    return control.offset, ring.offset, queue.capacity


class LibraryBurst(ExecutionBurst):
    """A `burst_session` of the driver's. It serves from `configure_burst` on."""

    def __init__(self, model: LibraryModel, offer: BurstOffer) -> None:
        self._model, self._driver, self._on_end = model, model.driver, offer.on_end
        self._offer: BurstOffer | None = offer  #: while the driver configures
        self._served: LibraryModel | None = None
        self._lock = threading.Lock()  # held in calls on the session: after `end_burst` there are none
        self._session: Any = None

    def configure(self, offer: Any) -> LibraryModel | None:
        """Give the driver a `burst_offer`. Returns the model that Burst shall serve it with; None: the driver serves.

        Raise StatusError.
        """
        place = ffi.new("burst_session **")
        with self._lock:
            try:
                self._driver.call("configure_burst", self._model.prepared, offer, place)
            finally:
                self._offer = None
            if (place[0] == ffi.NULL) == (self._served is None):
                raise GeneralFailure(
                    f"driver {self._driver.name!r}: configure_burst returned BURST_NONE, and "
                    f"{'made a session of a burst that it has Burst serve' if self._served else 'made nothing'}"
                )
            self._session = place[0] if self._served is None else None
        return self._served

    def serve(self, prepared: Any) -> None:
        """Have Burst serve with this `burst_prepared`. Raise ValueError."""
        model = self._driver.models.get(int(ffi.cast("uintptr_t", prepared)))
        if self._offer is None:
            raise ValueError("context: the burst is configured already; call serve in configure_burst")
        if model is None:
            raise ValueError(
                f"prepared={prepared}: this driver has made no such model, or has released it; give what "
                "configure_burst got, or what prepare has made"
            )
        request_binder(model, self._offer)
        self._served = model

    def start(self) -> None:
        """Note that the burst has begun."""

    def stop(self) -> None:
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                self._driver.tell("end_burst", session)

    def free_memory(self, slots: Iterable[int]) -> None:
        with self._lock:
            if self._session is not None and self._driver.has("free_memory"):
                numbers = list(slots)
                self._driver.tell("free_memory", self._session, ffi.new("int32_t[]", numbers), len(numbers))

    def finish(self) -> None:
        """Finish after the driver has said that the burst is over.

        Runs in another thread than the one that said so, which may be the driver's own and hold its locks.
        """
        self.stop()
        self._on_end()


@ffi.callback("void(void *)")  # type: ignore[untyped-decorator]
def _on_ended(context: Any) -> None:
    burst = _open.pop(int(ffi.cast("uintptr_t", context)), None)
    if burst is not None:
        threading.Thread(target=burst.finish, name="burst-finish", daemon=True).start()


@ffi.callback("burst_status(void *, burst_prepared *, burst_why *)", error=int(ErrorStatus.GENERAL_FAILURE))  # type: ignore[untyped-decorator]
def _on_serve(context: Any, prepared: Any, why: Any) -> int:
    burst = _open.get(int(ffi.cast("uintptr_t", context)))
    fault = f"context={context}: it is of no burst that is being configured; give that of the offer"
    if burst is not None:
        try:
            burst.serve(prepared)
        except ValueError as error:
            fault = str(error)
        else:
            return int(ErrorStatus.NONE)
    write_why(why, fault)
    return int(ErrorStatus.INVALID_ARGUMENT)
