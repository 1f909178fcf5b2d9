"""A model served to threads: the server of an event loop, in a thread that runs nothing else."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from burst import DeviceUnavailable
from burst.exhaustion import running_out
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from driver.nn import Model
    from driver.replicas.model_server import ModelServer

_T = TypeVar("_T")


class BlockingServer(ProcessBound):
    """One model for any number of threads. `CompiledModel.serve` makes it."""

    to_send = "pickle the compiled model, and serve the unpickled one"

    def __init__(self, make: Callable[[], ModelServer]) -> None:
        """Use `CompiledModel.serve`, and `open` before `run`."""
        self._server = make()
        with running_out():
            self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="burst-serve", daemon=True)

    def open(self) -> None:
        """Call `ModelServer.open`."""
        self._thread.start()
        try:
            self._wait(self._server.open())
        except BaseException:
            self._stop()
            raise

    def run(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any) -> Any:
        """Call `ModelServer.run`."""
        return self._wait(self._server.run(*arrays, timeout=timeout, deadline=deadline, **by_name))

    def submit(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> Future[tuple[Any, ...]]:
        """Begin a `run`, and return a future of its result. Leave the arrays alone until that is done."""
        return self._begin(self._server.run(*arrays, timeout=timeout, deadline=deadline, **by_name))

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._server.name

    @property
    def model(self) -> Model:
        """The model that is executed."""
        return self._server.model

    def stats(self) -> dict[str, Any]:
        """Call `ModelServer.stats`."""
        return self._server.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Call `ModelServer.drain`."""
        return self._wait(self._server.drain(timeout))

    def close(self, *, drain: bool = True) -> None:
        """Call `ModelServer.close`."""
        if self._loop.is_closed():
            return
        try:
            self._wait(self._server.close(drain=drain))
        finally:
            self._stop()

    def _begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if not self._thread.is_alive():
            work.close()
            raise DeviceUnavailable(f"{self.name} is closed; serve the model again")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __repr__(self) -> str:
        return f"<BlockingServer of {self._server!r}>"
