"""A burst that the driver's library serves itself: its `configure_burst`, `free_memory` and `end_burst`."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from burst import DeviceUnavailable, ExecutionBurst
from burst.channel import close_all
from driver.devices.library.table import ffi
from driver.options import PRIORITIES
from fmq.end import DEFAULT_SPIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from burst import BurstOffer
    from driver.devices.library.device import LibraryModel
    from fmq import Descriptor

_numbers = itertools.count(1)
_open: dict[int, LibraryBurst] = {}  # by the context that the driver gets; they live until the driver says `ended`


def configured(model: LibraryModel, offer: BurstOffer) -> LibraryBurst | None:
    """Return the driver's own burst; None: it leaves this one to the engine. Raises StatusError."""
    number = next(_numbers)
    burst = _open[number] = LibraryBurst(model, offer.on_end)
    fds: list[int] = []
    try:
        fds.extend(map(os.dup, (offer.requests.fds[0], offer.results.fds[0], offer.callback.fileno())))
        burst.configure(_flat(offer, fds, number))
    except BaseException as error:
        close_all(fds)
        _open.pop(number, None)
        if isinstance(error, DeviceUnavailable):
            return None
        raise
    return burst


def _flat(offer: BurstOffer, fds: list[int], number: int) -> Any:
    """Return a `burst_offer`."""
    found = ffi.new("burst_offer *", {"size": ffi.sizeof("burst_offer"), "version": offer.version})
    found.request_queue, found.result_queue, found.callback = fds
    found.request_offset, found.request_ring, found.request_elements = _places(offer.requests)
    found.result_offset, found.result_ring, found.result_elements = _places(offer.results)
    spin = DEFAULT_SPIN if isinstance(offer.spin, str) else offer.spin
    found.spin_ns, found.priority = int(spin * 1e9), list[str](PRIORITIES).index(offer.priority)
    found.context, found.ended = ffi.cast("void *", number), _on_ended
    return found


def _places(queue: Descriptor) -> tuple[int, int, int]:
    control, ring = queue.grantors[:2]
    return control.offset, ring.offset, queue.capacity


class LibraryBurst(ExecutionBurst):
    """A `burst_session` of the driver's. It serves from `configure_burst` on."""

    def __init__(self, model: LibraryModel, on_end: Callable[[], object]) -> None:
        self._model, self._driver, self._on_end = model, model.driver, on_end
        self._lock = threading.Lock()  # held in calls on the session: after `end_burst` there are none
        self._session: Any = None

    def configure(self, offer: Any) -> None:
        """Give the driver a `burst_offer`. Raises StatusError."""
        with self._lock:
            self._session = self._driver.made("configure_burst", "burst_session *", self._model.prepared, offer)

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
