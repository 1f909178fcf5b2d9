"""A .tflite file as a model.

    read(data)               the bytes of the file -> a Model
      TfliteFile                   what it says, checked (file.py, by way of guarded.py)
      TfliteGraph, TfliteCall            a subgraph and an operator on their way into the HAL (graph.py, call.py)
      fold                   shapes that the file computes (sizes.py)
      TABLE                  a short function for each builtin operator (table.py and its siblings)

The weights stay where they are: a constant is a view of the file, of lifetime CONSTANT_REFERENCE, and its `location` is
the (offset, length) of its bytes. Only what the HAL wants in another form (16-bit weights, 64-bit integers) is copied.
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
from .sizes import fold
from .table import TABLE


def load(file: Path) -> Model:
    """The model in a .tflite file."""
    return read(map_file(file))


def read(data: memoryview) -> Model:
    """The model in the bytes of a .tflite file; `ImportFailed` when they are damaged or cannot be mapped."""
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

    with np.errstate(all="ignore"):  # damaged numbers are infinite, or no numbers
        main, *referenced = [_subgraph(file, number, refer) for number in numbers]  # grows while it is walked
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
        raise ImportFailed("there is no operation for it in the HAL 1.3")
    call = TfliteCall(graph, operator, None if entry.options is None else operator.options(entry.options))
    if not fold(call):
        entry.convert(call)
        call.finish()
