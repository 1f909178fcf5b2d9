"""Convert an .onnx file to a model.

    read(data) -> Model
      OnnxFile               the content of the file, checked (file.py)
      OnnxGraph, OnnxCall    its values, and one operator, during conversion (graph.py, call.py)
      OnnxWalk               all operators of a graph, and of the branches in it (walk.py)
      fold                   computes constant expressions, such as shapes, at load time (fold.py)
      TABLE                  one short function per operator (table.py and the modules that it lists)
      quantise, dequantise   QuantizeLinear and DequantizeLinear (quantised.py)

This package reads protocol buffers itself. A library would unpack the whole file first: two bytes of the file can
become an object of a hundred bytes, and weights would be copied. So nothing needs to be installed, weights stay where
they are where the HAL wants the same order, and the work that a file can cause is bounded by its size.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import Array
from driver.importers.obstacle import Obstacle, Shapes, failure, fix_sizes
from driver.nn import Model

from .file import OnnxFile
from .graph import GraphContext, OnnxGraph
from .walk import OnnxWalk

_EARLIEST, _LATEST, _LATEST_IR = 7, 28, 14
"""The opsets and the versions of the file's format whose operators the table has."""


def read(data: memoryview, external: Mapping[str, Array] | None = None, shapes: Shapes | None = None) -> Model:
    """Convert the bytes of an .onnx file; raises `ImportFailed` when damaged or without counterpart in the HAL.

    external: the files that hold its weights, by the names that it has for them. shapes: sizes of inputs that the file
    leaves open.
    """
    model, found = convert(data, external, shapes)
    if model is None:
        raise failure(found)
    return model


def convert(
    data: memoryview, external: Mapping[str, Array] | None, shapes: Shapes | None
) -> tuple[Model | None, list[Obstacle]]:
    """Return the model, or None and all obstacles. Raise `ImportFailed` when the file cannot be read at all."""
    with np.errstate(all="ignore"):  # numbers in a damaged file may be infinite or NaN
        file = OnnxFile(data, external or {})
        if file.opset < _EARLIEST:
            raise ImportFailed(f"opset {file.opset} is too old; convert the model to opset {_EARLIEST} or newer")
        for what, version, latest in (("opset", file.opset, _LATEST), ("IR version", file.ir_version, _LATEST_IR)):
            if version > latest:
                reason = f"{what} {version} is newer than {latest}, the last one that is known here"
                raise ImportFailed(reason, remedy=f"export the model with {what} {latest} or older")
        shared = GraphContext(file)
        graph = OnnxGraph(shared, file.main)
        walk = OnnxWalk(graph, [])
        given = [info for info in file.main.inputs() if info.name not in graph.entries]
        shared.inputs |= fix_sizes({info.name: info.sizes for info in given}, shapes)
        for info in given:
            try:
                graph.declare(replace(info, sizes=shared.inputs[info.name]), *walk.scales.get(info.name, (1.0, 0)))
            except (ImportFailed, InvalidModel) as error:
                walk.found.append(Obstacle.of(error, None, None, (info.name,)))
                graph.broken.add(info.name)
        return walk.run(), walk.found
