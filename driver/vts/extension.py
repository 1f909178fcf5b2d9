"""extension: what a device does with vendor extensions and OEM operations: those that it knows, and all others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import InvalidArgument
from driver.nn import ExtensionType, Model, Operand, Operation, Subgraph
from driver.nn.extension import OEM
from driver.nn.types import OperandType
from driver.vts.kit import Test, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.vts.target import Target

_NAME = "burst.vts.unknown"
_PAIR = ExtensionType(_NAME, 7, "TENSOR_PAIR", np.dtype("V6"))
_NUMBER = ExtensionType(_NAME, 8, "NUMBER", np.dtype("V16"), is_scalar=True)


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    yield Test("extension/names", names)
    for place, (add, _) in _MIXED.items():
        yield Test(f"extension/unknown/{place}", partial(unknown, add))
    for name, make in (("types", typed), ("oem", oem)):
        yield Test(f"extension/{name}/answered", partial(answered, make))
    for name, make in _BROKEN.items():
        yield Test(f"extension/refused/{name}", partial(refused, make))


def names(target: Target) -> None:
    """The device names its extensions as the HAL demands: vendor.extension, each once."""
    found = target.device.extensions
    check(len(set(found)) == len(found), f"the device names an extension twice: {', '.join(found)}")
    for name in found:
        check("." in name and name == name.lower(), f"the extension {name!r:.80} is not named vendor.extension")


def _mixed(first: str, second: str) -> Model:
    """Return the model x -> first -> second -> y, on two floats."""
    sizes = "TENSOR_FLOAT32", (2,)
    operands = [
        *(Operand(*sizes, lifetime=life) for life in ("SUBGRAPH_INPUT", "TEMPORARY_VARIABLE", "SUBGRAPH_OUTPUT")),
        Operand("INT32", (), lifetime="CONSTANT_COPY", value=np.zeros((), np.int32)),
    ]
    steps = [Operation(kind, [n, n, 3] if kind == "ADD" else [n], [n + 1]) for n, kind in enumerate((first, second))]
    return Model(Subgraph(operands, steps, [0], [2]))


_SWAP = f"{_NAME}.SWAP"
_MIXED = {"before": (1, _mixed(_SWAP, "ADD")), "after": (0, _mixed("ADD", _SWAP))}


def unknown(add: int, target: Target) -> None:
    """An operation of an extension that no device knows is not supported; the ADD beside it is, if it is alone."""
    model = next(model for place, model in _MIXED.values() if place == add)
    found, alone = target.supported(model), target.supported(_mixed("ADD", "ADD"))
    check(len(alone) == 2, f"supported_operations returns {len(alone)} answers for 2 operations")
    check(not found[1 - add], f"the device supports an operation of {_NAME}, which is not one of its extensions")
    check(found[add] == alone[0], "whether ADD is supported depends on an operation of an unknown extension beside it")
    reason = target.device.explain(model)[1 - add]
    check(_NAME in str(reason), f"the reason against it does not name the extension: {reason!r:.120}")
    _is_refused(model, target)


def typed() -> Model:
    """Return a model of an operation on types of an extension, a tensor and a scalar, with parameters."""
    operands = [
        Operand(_PAIR, (2,), lifetime="SUBGRAPH_INPUT", extension_params=b"\x00\x01"),
        Operand(_NUMBER, (), lifetime="CONSTANT_COPY", value=np.zeros(16, np.uint8)),
        Operand(_PAIR, (2,), lifetime="SUBGRAPH_OUTPUT"),
    ]
    return Model(Subgraph(operands, [Operation(_SWAP, [0, 1], [2])], [0], [2]), extensions=((_NAME, 0x7FFF),))


def oem() -> Model:
    """Return a model of OEM_OPERATION on a tensor of bytes, with an OEM scalar of 5 bytes."""
    operands = [
        Operand("TENSOR_OEM_BYTE", (4,), lifetime="SUBGRAPH_INPUT"),
        Operand("OEM", (), lifetime="CONSTANT_COPY", value=np.arange(5, dtype=np.uint8)),
        Operand("TENSOR_OEM_BYTE", (4,), lifetime="SUBGRAPH_OUTPUT"),
    ]
    return Model(Subgraph(operands, [Operation("OEM_OPERATION", [0, 1], [2])], [0], [2]))


def answered(make: Callable[[], Model], target: Target) -> None:
    """The device says whether it supports it, and prepares it or refuses it accordingly."""
    model = make()
    (is_supported,) = target.supported(model)
    known = OEM.name if make is oem else _NAME
    check(not is_supported or known in target.device.extensions, f"it is supported, but {known} is not named")
    if is_supported:
        with target.prepared(model):
            return
    _is_refused(model, target)


def _is_refused(model: Model, target: Target) -> None:
    try:
        with target.prepared(model):
            pass
    except InvalidArgument:
        return
    check(False, "the device prepares a model that it says it does not support")


def _with_first(**fields: object) -> Model:
    """Return `typed` with another first operand, bypassing nothing: the record allows it, the rules do not."""
    graph = typed().main
    given = {"type": _PAIR, "dimensions": (2,), "lifetime": "SUBGRAPH_INPUT"} | fields
    return Model(Subgraph([Operand(**given), *graph.operands[1:]], graph.operations, graph.inputs, graph.outputs))  # type: ignore[arg-type]


_BROKEN: dict[str, Callable[[], Model]] = {
    "scale": partial(_with_first, scale=1.0),
    "zero_point": partial(_with_first, zero_point=1),
    "channel_quant": partial(_with_first, channel_quant=((1.0, 1.0), 0)),
    "scalar_with_dimensions": partial(_with_first, type=_NUMBER),
    "params_on_base_type": partial(_with_first, type=OperandType.TENSOR_FLOAT32, extension_params=b"\0"),
    "unlisted_input": partial(_with_first, lifetime="NO_VALUE"),
}


def refused(make: Callable[[], Model], target: Target) -> None:
    """An invalid model gets INVALID_ARGUMENT from every call, whether its extension is known or not."""
    model = make()
    for ask in (target.supported, partial(_is_refused, target=target)):
        try:
            ask(model)
        except InvalidArgument:
            continue
        check(ask is not target.supported, "supported_operations accepts an invalid model")
