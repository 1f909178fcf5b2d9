"""A model prepared on a device, to execute repeatedly: through a polling burst, a sleeping burst, or the plain path."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from driver.client.workspace import InputSet, OutputSet, Workspace
from driver.nn import ModelBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.client.device import RemoteDevice
    from driver.nn import Model

WAYS = POLLING, SLEEPING, PLAIN = "burst, polling", "burst, sleeping", "plain path"


def add_model() -> Model:
    """A model that adds four floats to four floats."""
    builder = ModelBuilder()
    a, b = builder.input("float32", (1, 4)), builder.input("float32", (1, 4))
    builder.output(builder.operation("ADD", a, b, 0))
    return builder.build()


class Work:
    """One prepared model and two open bursts on it. Inputs are in place: no call copies them. Idle bursts sleep."""

    def __init__(self, device: RemoteDevice, model: Model, arrays: Sequence[Any] | None = None) -> None:
        """`arrays`: the inputs; by default ones, if the model declares all shapes. Raises as `device.prepare` does."""
        operands = [model.main.operands[i] for i in model.main.inputs]
        self._arrays = arrays or [np.ones(o.dimensions, o.type.dtype) for o in operands]
        self._shapes = tuple(array.shape for array in self._arrays)
        self._stack = ExitStack()
        with self._stack as stack:
            self._prepared = stack.enter_context(device.prepare(model))
            self._stack = stack.pop_all()

    def calls(self) -> dict[str, Callable[[], object]]:
        """Opens the bursts; returns the call of each way, by its name."""
        return {POLLING: self._burst(), SLEEPING: self._burst(spin=0), PLAIN: self._plain()}

    def _burst(self, **options: Any) -> Callable[[], object]:
        burst = self._stack.enter_context(self._prepared.burst(input_shapes=self._shapes, **options))
        for place, array in zip(burst.inputs, self._arrays, strict=True):
            assert place is not None
            place[...] = array
        burst.run()
        return burst.run

    def _plain(self) -> Callable[[], object]:
        """Builds one request; its outputs have the size that a first execution reports."""
        workspace = Workspace(InputSet(self._prepared.model, self._shapes), OutputSet(self._prepared.model))
        workspace.inputs.fill(self._arrays)
        result = self._prepared.execute(workspace.request)
        if result.output_shapes and workspace.grow(result.output_shapes):
            result = self._prepared.execute(workspace.request)
        result.raise_for_status()
        return partial(self._prepared.execute, workspace.request)

    def close(self) -> None:
        """Closes the bursts and frees the model."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
