"""The device onnxruntime with a driver that loses memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.onnxruntime import OnnxRuntimeDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.interface import BindOptions, BoundExecution, Preparation, PreparedModel
    from driver.nn import Model

LOST_BYTES = 100_000
"""That each run loses."""
lost: list[Any] = []


class Leaking(OnnxRuntimeDevice):
    """Each run of a model keeps memory that nothing frees."""

    name = "leaking"

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        prepared = super().prepare(model, preparation)
        bind = prepared.bind

        def leaking(inputs: Sequence[Any], outputs: Sequence[Any], options: BindOptions) -> BoundExecution:
            execution = bind(inputs, outputs, options)
            run = execution.run

            def lose_and_run() -> None:
                lost.append(np.ones(LOST_BYTES, np.uint8))
                run()

            execution.run = lose_and_run
            return execution

        prepared.bind = leaking  # type: ignore[method-assign]
        return prepared
