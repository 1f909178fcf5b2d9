"""Convert a .tflite file to a model.

    read(data) -> Model
      TfliteFile                 the content of the file, checked (file.py)
      TfliteGraph, TfliteCall    a subgraph, and one operator, during conversion (graph.py, call.py)
      fold, compute              compute shapes, and other known integers, at load time (shapes.py, fold.py)
      TABLE                      one short function per builtin operator (table.py and the modules that it lists)

Weights stay in the file: a constant is a view of it, of lifetime CONSTANT_REFERENCE, and its `location` is the (offset,
length) of its bytes. Only data that the HAL takes in another form (16-bit weights, 64-bit integers) is copied.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import BudgetSpent
from driver.importers.obstacle import MOST_OBSTACLES, Consequence, InputSizes, Obstacle, Shapes, failure, fix_sizes
from driver.nn import Model, Subgraph, validate

from .call import TfliteCall
from .file import Operator, TfliteFile, TfliteSubgraph
from .fold import FOLDS, compute
from .graph import TfliteGraph
from .shapes import expect, fold
from .table import TABLE


def read(data: memoryview, shapes: Shapes | None = None) -> Model:
    """Convert the bytes of a .tflite file; raises `ImportFailed` when damaged or without counterpart in the HAL.

    shapes: sizes of inputs that the file leaves open.
    """
    model, found = convert(data, shapes)
    if model is None:
        raise failure(found)
    return model


def convert(data: memoryview, shapes: Shapes | None) -> tuple[Model | None, list[Obstacle]]:
    """Return the model, or None and all obstacles. Raise `ImportFailed` when the file cannot be read at all."""
    file, found = TfliteFile(data), list[Obstacle]()
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
        graphs: list[Subgraph | None] = []
        try:
            for number in numbers:  # `refer` appends while this iterates
                source = file.subgraph(number)
                inputs = _fix(source, file.names(0)[0], shapes) if number == 0 else {}
                graph = TfliteGraph(source, refer, inputs, is_resized=bool(shapes))
                graphs.append(_subgraph(graph, number, found))
        except BudgetSpent as error:
            return None, found or [Obstacle.of(error, None, None)]
        if found:
            return None, found
        main, *referenced = [graph for graph in graphs if graph is not None]
        model = Model(main, tuple(referenced))
        try:
            validate(model)
        except InvalidModel as error:
            raise ImportFailed(f"not a valid graph: {error}") from None
    return model, found


def _fix(source: TfliteSubgraph, names: dict[int, str], shapes: Shapes | None) -> dict[str, InputSizes]:
    """Give the inputs the sizes of `shapes`; the inputs as they are then, by name."""
    inputs, declared = {}, {}
    for tensor in source.inputs:
        with contextlib.suppress(ImportFailed):  # of a type that the HAL does not have: refused where it is read
            info = source.tensor(tensor)
            inputs[names.get(tensor, info.name)] = tensor
            declared[names.get(tensor, info.name)] = InputSizes(info.shape)
    fixed = fix_sizes(declared, shapes)
    for name, sizes in fixed.items():
        if sizes.shape is not None and sizes != declared[name]:
            source.resize(inputs[name], sizes.shape)
    return fixed


def _subgraph(graph: TfliteGraph, number: int, found: list[Obstacle]) -> Subgraph | None:
    """Convert one subgraph; None where there are obstacles, which are added to `found`."""
    mine: list[Obstacle] = []
    try:
        for tensor in graph.source.inputs:
            _attempt(mine, graph, None, [tensor], action=partial(graph.take, tensor))
        for operator in graph.source.operators():
            tensors = (*operator.inputs, *operator.outputs)
            if not _attempt(mine, graph, operator, tensors, action=partial(_map, graph, operator)):
                graph.give_up(operator)
        for tensor in graph.source.outputs if mine else ():
            _attempt(mine, graph, None, [tensor], action=partial(graph.read, tensor))
        result: list[Subgraph] = []
        if not mine:
            names, is_main = graph.source.file.names(number), number == 0
            finish = partial(graph.finish, names, is_main=is_main)
            _attempt(mine, graph, None, graph.source.outputs, action=lambda: result.append(finish()))
        return result[0] if result else None
    finally:
        where = f"subgraph {number}: " if number else ""
        found += [obstacle._replace(reason=f"{where}{obstacle.reason}") for obstacle in mine]


def _attempt(
    found: list[Obstacle],
    graph: TfliteGraph,
    operator: Operator | None,
    tensors: Sequence[int],
    action: Callable[[], object],
) -> bool:
    """Return True if `action` succeeds; note its obstacle, unless it is the consequence of another one."""
    try:
        action()
    except Consequence:
        return False
    except (ImportFailed, InvalidModel) as error:
        kind, number = (None, None) if operator is None else (operator.name, operator.index)
        seen = Obstacle.of(error, kind, number, [graph.source.name(tensor) for tensor in tensors if tensor >= 0])
        read = "" if operator is None else graph.seen(operator.inputs, seen.reason)
        found.append(seen._replace(reason=seen.reason + read))
        if operator is None:
            graph.broken.update(tensors)
        if isinstance(error, BudgetSpent):
            raise
        if len(found) >= MOST_OBSTACLES:
            raise BudgetSpent(f"{MOST_OBSTACLES} obstacles; the importer looks for no more") from None
        return False
    return True


def _map(graph: TfliteGraph, operator: Operator) -> None:
    rule = TABLE.get(operator.name)
    if rule is None and operator.name not in FOLDS:
        raise ImportFailed("the HAL 1.3 has no operation for it")
    call = TfliteCall(graph, operator, operator.options(rule.options) if rule is not None and rule.options else None)
    expect(call)
    if fold(call) or compute(call):
        return
    if rule is None:
        raise ImportFailed(
            "the HAL 1.3 has no operation for it; it is computed at load time where its inputs are known"
        )
    rule.convert(call)
    call.finish()
