"""ONNX Runtime, killed by a file's input whose first element is 13, at every try."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from driver.devices.onnxruntime import OnnxRuntimeDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, BoundExecution, Preparation, PreparedModel
    from driver.nn import Model


class Fatal(OnnxRuntimeDevice):
    """Computes as ONNX Runtime does."""

    name = "fatal"

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        prepared = super().prepare(model, preparation)
        bind = prepared.bind

        def fatal(
            inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
        ) -> BoundExecution:
            execution = bind(inputs, outputs, options)
            run = execution.run

            def crash() -> None:
                if inputs[0] is not None and inputs[0].flat[0] == 13:
                    ctypes.string_at(0)
                run()

            execution.run = crash
            return execution

        prepared.bind = fatal  # type: ignore[method-assign]
        return prepared
