"""model: a device accepts what is valid, and refuses every model that breaks a rule of the HAL."""

from __future__ import annotations

import struct
from copy import copy
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from burst import InvalidArgument, StatusError
from driver.errors import InvalidModel
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.operations import prepared
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.nn import Model
    from driver.vts.target import Target

_MUTATIONS = "driver.vts.mutations"
_NO_TYPES = (-1, 16, 9999, 10002, 2**31 - 1)
_UNSAYABLE = (ValueError, TypeError, OverflowError, AttributeError, struct.error)


def tests(samples: int) -> Iterator[Test]:
    """Every mutation of so many of the kit's models."""
    for name in SAMPLES:
        yield Test(f"model/{name}/valid", partial(accept, name))
    for name in SAMPLES[:samples]:
        for mutation in model_mutations(sample(name).model):
            yield Test(f"model/{name}/{mutation.name}", partial(refuse, mutation.make))
        for code in _NO_TYPES:
            yield Test(f"model/{name}/type_on_the_wire/{code}", partial(refuse, partial(with_type, name, code)))


def model_mutations(model: Model) -> Iterator[Any]:
    """Broken variations of a model: each has a `name`, and `make()` makes it."""
    if find_spec(_MUTATIONS) is None:
        return iter(())
    mutations: Iterator[Any] = import_module(_MUTATIONS).model_mutations(model)
    return mutations


def with_type(name: str, code: int) -> Model:
    """One of the kit's models whose first operand has a type that no record may have."""
    model = sample(name).model
    first, *others = model.main.operands
    wrong = copy(first)
    object.__setattr__(wrong, "type", code)
    return replace(model, main=replace(model.main, operands=(wrong, *others)))


def accept(name: str, target: Target) -> None:
    """A valid model is prepared, if its operations are supported."""
    with prepared(sample(name), target):
        pass


def refuse(make: Callable[[], Model], target: Target) -> None:
    """An invalid one gets INVALID_ARGUMENT whatever is asked of it."""
    try:
        model = make()
    except InvalidModel as error:
        skip(f"no record can hold this model ({error}); type_on_the_wire sends some of that kind")
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
        skip(f"a connection cannot carry this model: {error}")
    check(False, f"{what} accepts an invalid model")
