"""A burst that carries a state: outputs of an execution are inputs of the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from driver.client.names import by_position, together
from driver.client.surface import AnyBurst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import Memory, Result
    from driver.client.job import Job
    from driver.client.result_stream import ResultStream
    from driver.client.stream_plan import StreamPlan
    from driver.client.tasks import Tasks
    from driver.nn import Model


class StatefulBurst(AnyBurst):
    """A burst whose states are in its `inputs`: zeros at first, and after each run what the run has made of them.

    It runs one request after another. A run that fails leaves the states as they were, and they outlive the device.
    """

    def __init__(self, burst: AnyBurst, pairs: Sequence[tuple[int, int]]) -> None:
        """Use `prepared.burst(state=…)`. pairs: of an output and the input that it becomes."""
        self._burst, self._pairs, self.on_memory = burst, pairs, burst.on_memory
        self._names = tuple(tensor.name for tensor in burst.model.inputs)

    @property
    def model(self) -> Model:
        return self._burst.model

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        return self._burst.inputs

    def run(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any) -> Result:
        """Run as any burst does. States that are not given, or None, are those that the last run has left."""
        given = self._with_states(together(arrays, by_name))
        return self._kept(self._burst.run(*given, timeout=timeout, deadline=deadline))

    async def run_async(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> Result:
        """Do as `run`, for asyncio: one at a time."""
        given = self._with_states(together(arrays, by_name))
        return self._kept(await self._burst.run_async(*given, timeout=timeout, deadline=deadline))

    def _with_states(self, arrays: tuple[Any, ...]) -> Sequence[Any]:
        """Return what was given, by position, with the states."""
        if not arrays:
            return arrays
        found = list(by_position(arrays, self._names, self.model.optional))
        for _, n in self._pairs:
            if n < len(found) and found[n] is None:
                found[n] = np.array(self.inputs[n])  # for other shapes its memory is laid out anew
        return found

    def _kept(self, result: Result) -> Result:
        """Write the states to where the next run reads them."""
        for output, n in self._pairs:
            place, state = self.inputs[n], result.outputs[output]
            if place is None or place.shape != state.shape:
                was = None if place is None else list(place.shape)
                raise ValueError(
                    f"the state {self._names[n]!r} was {was} and is now {list(state.shape)}: a state of state= keeps "
                    "its shape; feed this one yourself, or by burst.stream_results"
                )
            np.copyto(place, state)
        return result

    @property
    def source(self) -> NoReturn:
        """Nothing that `submit` and `stream` could use. Raise ValueError."""
        raise ValueError("a burst with state= runs one request after another: use run or run_async")

    @property
    def tasks(self) -> Tasks:
        return self._burst.tasks

    def perform(self, job: Job) -> Result:
        return self._burst.perform(job)

    def repeated(self, plan: StreamPlan, inputs: tuple[Any, ...], deadline: float | None) -> ResultStream:
        return self._burst.repeated(plan, inputs, deadline)

    def free_memory(self, memory: Memory) -> None:
        self._burst.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        return self._burst.stats()

    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        return self._burst.timeline(name, first_lane)

    def close(self) -> None:
        self._burst.close()
