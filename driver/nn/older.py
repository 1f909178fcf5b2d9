"""Models for drivers that speak an older version of the HAL: what these can express, in the form that they know."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from .model import Model, Operation, Subgraph
from .validate import needed_inputs, operation_version

HalVersion = Literal["1.0", "1.1", "1.2", "1.3"]
_NEWEST = "1.3"
_OPEN_OUTPUTS = 2  # since this version an output may have a size that only its execution tells


def minor(version: HalVersion) -> int:
    """Return the number behind the point. Raise ValueError."""
    if version not in get_args(HalVersion):
        raise ValueError(f"hal_version={version!r:.40}: one of {', '.join(map(repr, get_args(HalVersion)))}")
    return int(version.partition(".")[2])


def too_new(model: Model, version: HalVersion) -> list[str | None]:
    """Return for each operation of a valid model why that version cannot express it; None: it can."""
    known, graph = minor(version), model.main
    if version == _NEWEST:
        return [None] * len(graph.operations)
    found = [_needed(graph, operation) for operation in graph.operations]
    return [f"it needs HAL 1.{n}, and the device speaks {version}" if n > known else None for n in found]


def _needed(graph: Subgraph, operation: Operation) -> int:
    is_open = not all(graph.operands[i].is_known for i in operation.outputs)
    return max(operation_version(graph, operation), _OPEN_OUTPUTS if is_open else 0)


def form_for_version(model: Model, version: HalVersion) -> Model:
    """Return a model that this version can express, without what only a newer one knows.

    That are inputs at the end of operations that say what the older one does, and the permission to compute as float16.
    Its inputs and outputs are the same.
    """
    known, graph = minor(version), model.main
    if version == _NEWEST:
        return model
    operations = [
        Operation(operation.type, operation.inputs[: needed_inputs(graph, operation)], operation.outputs)
        for operation in graph.operations
    ]
    used = {i for operation in operations for i in (*operation.inputs, *operation.outputs)}
    kept = sorted(used.union(graph.inputs, graph.outputs))
    numbers = {old: new for new, old in enumerate(kept)}

    def numbered(indices: Sequence[int]) -> list[int]:
        return [numbers[i] for i in indices]

    main = Subgraph(
        [replace(graph.operands[i], number_of_consumers=None) for i in kept],
        [Operation(o.type, numbered(o.inputs), numbered(o.outputs)) for o in operations],
        numbered(graph.inputs),
        numbered(graph.outputs),
    )
    return replace(model, main=main, relaxed=model.relaxed and known > 0)
