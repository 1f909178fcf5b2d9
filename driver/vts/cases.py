"""Cases: a model, what goes in and what has to come out. Read from lines of JSON, or made by the kit itself."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.nn import Model, Operand, OperandLifeTime, OperandType, Operation, Subgraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_UNSIGNED, _SIGNED = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
_NO_TWIN = {"HASHTABLE_LOOKUP", "LSH_PROJECTION", "PAD_V2", "CAST", "QUANTIZED_16BIT_LSTM"}
_HALF_WAY = 128
_SAFE_NAME = str.maketrans({"/": "_", " ": "_"})


class BadCase(ValueError):
    """A line is no case, or a file cannot be read. The message names the file, the line and what is wrong there."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One model with its inputs and what is expected of it.

    feeds: an array for each input, in its operand's dtype and shape; None omits it.
    expected: the values of each output, flat and in its operand's dtype; None where they are not compared.
    must_fail: it has to be refused when it is prepared, or fail when it is executed.
    frequency: above 0, outputs are draws, and this is how far the frequency of a class may be from its probability.
    """

    name: str
    model: Model
    feeds: tuple[NDArray[Any] | None, ...]
    expected: tuple[NDArray[Any] | None, ...]
    must_fail: bool = False
    frequency: float = 0.0

    @property
    def outputs(self) -> list[Operand]:
        """The operands of its outputs."""
        return [self.model.main.operands[i] for i in self.model.main.outputs]

    @property
    def operations(self) -> list[str]:
        """The operations of all its subgraphs, each once."""
        graphs = (self.model.main, *self.model.referenced)
        return list(dict.fromkeys(operation.type for graph in graphs for operation in graph.operations))

    def is_half(self) -> bool:
        """Whether float32 need be no more exact than float16."""
        graphs = (self.model.main, *self.model.referenced)
        types = chain.from_iterable((operand.type for operand in graph.operands) for graph in graphs)
        return self.model.relaxed or OperandType.TENSOR_FLOAT16 in types

    def with_open_outputs(self) -> Case | None:
        """The same with no dimension of an output known before it runs; None where there is no such variation."""
        if self.must_fail or any(o.type.is_scalar for o in self.outputs):
            return None
        graph, operands = self.model.main, list(self.model.main.operands)
        for i in graph.outputs:
            operands[i] = replace(operands[i], dimensions=(0,) * len(operands[i].dimensions))
        return replace(self, model=replace(self.model, main=_with_operands(graph, operands)))

    def signed(self) -> Case | None:
        """Its signed twin: every unsigned quantised value 128 lower. None where there is none."""
        graph = self.model.main
        if len(graph.operations) != 1 or self.model.referenced or graph.operations[0].type in _NO_TWIN:
            return None
        if all(o.type != _UNSIGNED for o in graph.operands):
            return None
        model = replace(self.model, main=_with_operands(graph, [_signed_operand(o) for o in graph.operands]))
        feeds = _shifted(graph, graph.inputs, self.feeds)
        return replace(self, model=model, feeds=feeds, expected=_shifted(graph, graph.outputs, self.expected))


def _with_operands(graph: Subgraph, operands: Sequence[Operand]) -> Subgraph:
    return Subgraph(operands, graph.operations, graph.inputs, graph.outputs)


def _signed_operand(operand: Operand) -> Operand:
    if operand.type != _UNSIGNED:
        return operand
    value = _lower(operand.value) if operand.lifetime.is_constant else operand.value
    return replace(operand, type=_SIGNED, zero_point=operand.zero_point - _HALF_WAY, value=value)


def _lower(array: NDArray[Any]) -> NDArray[Any]:
    return (array ^ np.uint8(_HALF_WAY)).view(np.int8)


def _shifted(
    graph: Subgraph, indices: Sequence[int], arrays: Sequence[NDArray[Any] | None]
) -> tuple[NDArray[Any] | None, ...]:
    return tuple(
        _lower(array) if array is not None and graph.operands[i].type == _UNSIGNED else array
        for i, array in zip(indices, arrays, strict=True)
    )


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a file of JSON lines, gzipped if its name ends so. Raises BadCase."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parsed(line, f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadCase(f"{path}: cannot be read: {error}") from error


def _parsed(line: str, where: str) -> Case:
    try:
        return _case(json.loads(line))
    except KeyError as error:
        raise BadCase(f"{where}: the field {error} is missing") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise BadCase(f"{where}: {error}") from error


def _case(record: dict[str, Any]) -> Case:
    graph = _graph(record)
    model = Model(graph, tuple(map(_graph, record.get("subgraphs", ()))), bool(record["relaxed"]))
    if not graph.operations or not graph.outputs:
        raise ValueError("a model has at least one operation and one output")
    feeds = [_array(graph.operands[i], values) for i, values in _paired("inputs", graph.inputs, record["feeds"])]
    expected = [_flat(graph.operands[i], v) for i, v in _paired("outputs", graph.outputs, record["expected"])]
    return Case(
        str(record["name"]).translate(_SAFE_NAME),
        model,
        tuple(feeds),
        tuple(expected),
        bool(record["expect_failure"]),
        float(record.get("expected_multinomial", 0.0)),
    )


def _paired(what: str, indices: Sequence[int], lists: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    if len(indices) != len(lists):
        raise ValueError(f"{len(lists)} lists of values for {len(indices)} {what}")
    return zip(indices, lists, strict=True)


def _graph(record: dict[str, Any]) -> Subgraph:
    operations = [Operation(o["type"], o["inputs"], o["outputs"]) for o in record["operations"]]
    return Subgraph([_operand(o) for o in record["operands"]], operations, record["inputs"], record["outputs"])


def _operand(record: dict[str, Any]) -> Operand:
    quant = record.get("channel_quant")
    operand = Operand(
        record["type"],
        record["dims"],
        record["scale"],
        record["zero_point"],
        record["lifetime"],
        channel_quant=(quant["scales"], quant["channel_dim"]) if quant else None,
    )
    value = record.get("value")
    if operand.lifetime.is_constant:
        by_reference = (record.get("extra") or {}).get("by_reference")
        lifetime = OperandLifeTime.CONSTANT_REFERENCE if by_reference else operand.lifetime
        return replace(operand, value=_flat(operand, value).reshape(operand.dimensions), lifetime=lifetime)
    return replace(operand, value=value)


def _flat(operand: Operand, values: Sequence[Any] | None) -> Any:
    """The values in the operand's dtype; None where there are none."""
    if values is None:
        return None
    with np.errstate(all="ignore"):
        array = np.array(values, operand.type.dtype)
    if array.ndim != 1:
        raise ValueError(f"the values of a {operand.type.name} are a flat list, not one of {array.ndim} dimensions")
    return array


def _array(operand: Operand, values: Sequence[Any]) -> NDArray[Any] | None:
    return _flat(operand, values).reshape(operand.dimensions) if values else None
