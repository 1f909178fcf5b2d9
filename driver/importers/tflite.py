"""A .tflite file as a model.

    read(data)               the bytes of the file -> a Model
      File                   what it says, checked (tflite_file.py, by way of guarded.py)
      Graph, Call            a subgraph and an operator on their way into the HAL (tflite_graph.py, tflite_call.py)
      fold                   shapes that the file computes (tflite_sizes.py)
      TABLE                  a short function for each builtin operator (tflite_table.py and its siblings)

The weights stay where they are: a constant is a view of the file, of lifetime CONSTANT_REFERENCE, and its `location` is
the (offset, length) of its bytes. Only what the HAL wants in another form (16-bit weights, 64-bit integers) is copied.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.nn import Model, Subgraph, validate

from .mapped import mapped
from .tflite_call import Call
from .tflite_file import File, Operator
from .tflite_graph import Graph
from .tflite_sizes import fold
from .tflite_table import TABLE


def load(file: Path) -> Model:
    """The model in a .tflite file."""
    return read(mapped(file))


def read(data: memoryview) -> Model:
    """The model in the bytes of a .tflite file; `ImportFailed` when they are damaged or cannot be mapped."""
    file = File(data)
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


def _subgraph(file: File, number: int, refer: Callable[[int], int]) -> Subgraph:
    where = f"subgraph {number}: " if number else ""
    try:
        graph = Graph(file.subgraph(number), refer)
        for operator in graph.source.operators():
            try:
                _map(graph, operator)
            except (ImportFailed, InvalidModel) as error:
                raise ImportFailed(f"{where}{error}", operator.name, operator.index) from None
        return graph.finish(file.names(number), is_main=number == 0)
    except InvalidModel as error:
        raise ImportFailed(f"{where}{error}") from None


def _map(graph: Graph, operator: Operator) -> None:
    entry = TABLE.get(operator.name)
    if entry is None:
        raise ImportFailed("there is no operation for it in the HAL 1.3")
    call = Call(graph, operator, None if entry.options is None else operator.options(entry.options))
    if not fold(call):
        entry.convert(call)
        call.finish()
