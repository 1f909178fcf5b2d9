"""Results that take several executions, one after the other, without a thread that waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import CANCELLED
from typing import TYPE_CHECKING

from burst import Result

if TYPE_CHECKING:
    from collections.abc import Callable


class LaterResult(Future[Result]):
    """What the last of several executions makes of a request. `cancel` gives up the one that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._present: Future[Result] | None = None

    def follow(self, execution: Future[Result], then: Callable[[Future[Result]], object]) -> None:
        """It goes on now; `then` gets it when it is done, in the thread that completes it, and ends with `settle`."""

        def done(execution: Future[Result]) -> None:
            try:
                then(execution)
            except BaseException as error:  # noqa: BLE001 (it belongs to the future)
                self.settle(_raising(error))

        self._present = execution
        execution.add_done_callback(done)
        if self.cancelled():
            execution.cancel()

    def settle(self, make: Callable[[], Result]) -> None:
        """Completes it with what `make` returns or raises; nothing when it was cancelled."""
        with self._condition:
            if self.done():
                return
            self.set_running_or_notify_cancel()
        try:
            self.set_result(make())
        except BaseException as error:  # noqa: BLE001 (it belongs to the future)
            self.set_exception(error)
        self._present = None  # its callbacks refer to this

    def cancel(self) -> bool:
        """Gives it up: the execution that goes on, and those after it. False when it is done."""
        if not super().cancel():
            return False
        with self._condition:
            if self._state == CANCELLED:
                self.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would not hear of it
        if (present := self._present) is not None:
            present.cancel()
        return True


def _raising(error: BaseException) -> Callable[[], Result]:
    def make() -> Result:
        raise error

    return make
