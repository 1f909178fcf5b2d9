"""Convert a .tflite file to a model.

    read(data) -> Model
      TfliteFile                 the content of the file, checked (file.py)
      TfliteGraph, TfliteCall    a subgraph, and one operator, during conversion (graph.py, call.py)
      fold                       computes shapes at load time (shapes.py)
      TABLE                      one short function per builtin operator (table.py and the modules that it lists)

Weights stay in the file: a constant is a view of it, of lifetime CONSTANT_REFERENCE, and its `location` is the (offset,
length) of its bytes. Only data that the HAL takes in another form (16-bit weights, 64-bit integers) is copied.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.importers.file_bytes import map_file
from driver.nn import Model, Subgraph, validate

from .call import TfliteCall
from .file import Operator, TfliteFile
from .graph import TfliteGraph
from .shapes import fold
from .table import TABLE


def load(file: Path) -> Model:
    """Load a .tflite file."""
    return read(map_file(file))


def read(data: memoryview) -> Model:
    """Convert the bytes of a .tflite file; raises `ImportFailed` when damaged or without counterpart in the HAL."""
    file = TfliteFile(data)
    numbers, places = [0], {0: -1}

    def refer(number: int) -> int:
        if number == 0:
            raise ImportFailed("it refers to the main subgraph")
        if number not in places:
            file.subgraph(number)
            places[number] = len(places) - 1
            numbers.append(number)
        return places[number]

    with np.errstate(all="ignore"):  # numbers in a damaged file may be infinite or NaN
        main, *referenced = [
            _subgraph(file, number, refer) for number in numbers
        ]  # `refer` appends while this iterates
        model = Model(main, tuple(referenced))
        try:
            validate(model)
        except InvalidModel as error:
            raise ImportFailed(f"not a valid graph: {error}") from None
    return model


def _subgraph(file: TfliteFile, number: int, refer: Callable[[int], int]) -> Subgraph:
    where = f"subgraph {number}: " if number else ""
    try:
        graph = TfliteGraph(file.subgraph(number), refer)
        for operator in graph.source.operators():
            try:
                _map(graph, operator)
            except (ImportFailed, InvalidModel) as error:
                raise ImportFailed(f"{where}{error}", operator.name, operator.index) from None
        return graph.finish(file.names(number), is_main=number == 0)
    except InvalidModel as error:
        raise ImportFailed(f"{where}{error}") from None


def _map(graph: TfliteGraph, operator: Operator) -> None:
    entry = TABLE.get(operator.name)
    if entry is None:
        raise ImportFailed("the HAL 1.3 has no operation for it")
    call = TfliteCall(graph, operator, None if entry.options is None else operator.options(entry.options))
    if not fold(call):
        entry.convert(call)
        call.finish()
