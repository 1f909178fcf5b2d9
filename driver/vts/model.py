"""model: a device accepts valid models, and refuses every model that breaks a rule of the HAL."""

from __future__ import annotations

import struct
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from burst import InvalidArgument, StatusError
from driver.errors import InvalidModel
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.mutations import model_mutations
from driver.vts.operations import prepared
from driver.vts.qos import endless
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.nn import Model
    from driver.vts.target import Target

_NO_TYPES = {"MIN-1": -1, "FUNDAMENTAL_MAX+1": 16, "OEM_MIN-1": 9999, "OEM_MAX+1": 10002}
_UNSAYABLE = (ValueError, TypeError, OverflowError, AttributeError, struct.error)


def tests(samples: int) -> Iterator[Test]:
    """samples: how many of the kit's models are mutated, each in every way."""
    for name in SAMPLES:
        yield Test(f"model/{name}/valid", partial(accept, name))
    for name, make in (("data", circular_data), ("subgraphs", circular_subgraphs)):
        yield Test(f"model/cycle/{name}", partial(refuse, make))
    for name in SAMPLES[:samples]:
        for mutation in model_mutations(sample(name).model):
            kind, number, *detail = mutation.name.split("/")
            code = _NO_TYPES.get(detail[-1]) if kind == "operand-type" else None
            make = mutation.make if code is None else partial(with_type, name, int(number), code)
            yield Test(f"model/{name}/{mutation.name}", partial(refuse, make))


def with_type(name: str, number: int, code: int) -> Model:
    """Return one of the kit's models with an operand of an invalid type, bypassing the checks of the record."""
    model = sample(name).model
    operands = list(model.main.operands)
    operands[number] = copy(operands[number])
    object.__setattr__(operands[number], "type", code)
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def circular_data() -> Model:
    """Return a model of two operations, each of which reads what the other one writes."""
    model = sample("chain").model
    first, second, *rest = model.main.operations
    circular = replace(first, inputs=(second.outputs[0], *first.inputs[1:]))
    return replace(model, main=replace(model.main, operations=(circular, second, *rest)))


def circular_subgraphs() -> Model:
    """Return a WHILE whose body is the subgraph in which it stands."""
    model = endless().model
    return replace(model, referenced=(model.referenced[0], model.main))


def accept(name: str, target: Target) -> None:
    """A valid model is prepared if its operations are supported."""
    with prepared(sample(name), target):
        pass


def refuse(make: Callable[[], Model], target: Target) -> None:
    """An invalid model gets INVALID_ARGUMENT from every call."""
    try:
        model = make()
    except InvalidModel as error:
        skip(f"this model cannot be constructed: {error}")
    _refuse("supported_operations", lambda: target.supported(model))
    _refuse("prepare", lambda: _prepare(model, target))


def _prepare(model: Model, target: Target) -> None:
    with target.prepared(model):
        pass


def _refuse(what: str, ask: Callable[[], object]) -> None:
    try:
        ask()
    except InvalidArgument:
        return
    except StatusError as error:
        raise Failed(f"{what} answers {error.status.name} to an invalid model, not INVALID_ARGUMENT") from error
    except _UNSAYABLE as error:
        skip(f"this model cannot be sent: {error}")
    check(False, f"{what} accepts an invalid model")
