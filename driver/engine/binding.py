"""Checks a request against a model and binds its arguments to arrays.

The rules are those of the HAL's request validation; any breach is INVALID_ARGUMENT, and nothing is executed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import (
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputShape,
    Result,
)
from burst import OutputInsufficientSize as InsufficientSize
from burst.messages import Cause
from driver.engine.image_io import PoolAccess
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.nn import LONGEST_LOOP_TIMEOUT, LOOP_TIMEOUT, combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Memory, Request, RequestArgument
    from driver.interface import BoundExecution, PreparedModel
    from driver.nn import Model, Operand


class BoundRequest:
    """A burst.Execution: one request on one prepared model, checked, with its arrays in the pools."""

    def __init__(
        self, model: Model, prepared: PreparedModel, request: Request, pace: Callable[[], object] = lambda: None
    ) -> None:
        """Raises InvalidArgument for a request that does not fit, GeneralFailure for what cannot be computed."""
        graph = model.main
        _check_count("inputs", request.inputs, graph.inputs)
        _check_count("outputs", request.outputs, graph.outputs)
        access, operands = PoolAccess(), graph.operands
        inputs = [
            _input(n, a, operands[i], request, access) for n, (a, i) in enumerate(_pairs(request.inputs, graph.inputs))
        ]
        outputs = [
            _output(n, a, operands[i], request, access)
            for n, (a, i) in enumerate(_pairs(request.outputs, graph.outputs))
        ]
        request = access.with_image_shapes(request)
        try:
            self._bound = prepared.bind(inputs, outputs, pace, _loop_timeout(request))
        except ExecutionFailed as error:
            raise GeneralFailure(str(error)) from error
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        self.is_static = prepared.is_static
        if self.is_static:
            _check_shapes(request, self._bound)
        is_fit = self.is_static and all(enough for _, enough in self._bound.shapes)
        self.native = self._bound.native if is_fit and not access else None
        self.cancel = self._bound.cancel
        is_bare = is_fit and self._bound.is_infallible
        self.run = access.wrap(self._bound.run if is_bare else partial(_run, request, self._bound))
        self.copied_bytes = self._bound.copied_bytes + access.copied_bytes
        self.checked_bytes = self._bound.checked_bytes
        self.estimate: Any = None  #: burst_estimate of its duration, set by the engine

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """Shapes of the outputs, once it has run."""
        return _shapes(self._bound)


def _loop_timeout(request: Request) -> float:
    return LOOP_TIMEOUT if request.loop_timeout is None else min(request.loop_timeout / 1e9, LONGEST_LOOP_TIMEOUT)


def _run(request: Request, bound: BoundExecution) -> None:
    try:
        bound.run()
        _check_shapes(request, bound)
    except OutputInsufficientSize as error:
        status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        raise InsufficientSize(str(error), Result(status, (), tuple(OutputShape(*s) for s in error.shapes))) from error
    except LoopTimeout as error:
        raise MissedDeadlineTransient(str(error), cause=Cause("executing")) from error
    except ExecutionFailed as error:
        raise GeneralFailure(str(error)) from error


def _check_shapes(request: Request, bound: BoundExecution) -> None:
    """Raises GeneralFailure where the request gives an output's shape and it is wrong, as the HAL demands."""
    for n, (argument, (found, _)) in enumerate(zip(request.outputs, bound.shapes, strict=True)):
        if combine_dimensions(argument.dimensions, found) is None:
            raise GeneralFailure(
                f"output {n}: the request gives dimensions {list(argument.dimensions)}, but its shape is {list(found)}"
            )


def _shapes(bound: BoundExecution) -> tuple[OutputShape, ...]:
    return tuple(OutputShape(*shape) for shape in bound.shapes)


def _pairs(arguments: Sequence[RequestArgument], operands: Sequence[int]) -> Any:
    return zip(arguments, operands, strict=True)


def _check_count(what: str, given: Sequence[object], expected: Sequence[object]) -> None:
    if len(given) != len(expected):
        raise InvalidArgument(f"{len(given)} {what}; the model has {len(expected)}")


def _input(
    n: int, argument: RequestArgument, operand: Operand, request: Request, access: PoolAccess
) -> NDArray[Any] | None:
    if argument.has_no_value:
        return None
    pool = _pool(f"input {n}", argument, request)
    access.uses(pool, writes=False)
    if isinstance(pool, HardwareBuffer):
        return access.input(f"input {n}", argument, operand, pool)
    dims = _dimensions(f"input {n}", argument, operand)
    if 0 in dims or not (dims or operand.type.is_scalar):
        raise InvalidArgument(f"input {n}: dimensions {dims} are not fully known; give them in the request")
    memory = _memory(f"input {n}", argument, pool)
    needed = math.prod(dims) * operand.type.element_size
    if needed > len(memory):
        raise InvalidArgument(f"input {n}: {len(memory)} bytes are too few for {operand.type.name} {list(dims)}")
    return memory[:needed].view(operand.type.dtype).reshape(dims)


def _output(n: int, argument: RequestArgument, operand: Operand, request: Request, access: PoolAccess) -> NDArray[Any]:
    if argument.has_no_value:
        raise InvalidArgument(f"output {n}: only inputs may be omitted")
    pool = _pool(f"output {n}", argument, request)
    if not pool.writable:
        raise InvalidArgument(f"output {n}: pool {argument.pool} is read-only; put outputs into a writable pool")
    access.uses(pool, writes=True)
    if isinstance(pool, HardwareBuffer):
        return access.output(n, argument, operand, pool)
    _dimensions(f"output {n}", argument, operand)
    return _memory(f"output {n}", argument, pool)


def _dimensions(where: str, argument: RequestArgument, operand: Operand) -> tuple[int, ...]:
    """The request's dimensions if it gives them, else the model's. Raises InvalidArgument if they contradict."""
    given, declared = argument.dimensions, operand.dimensions
    if not given:
        return declared
    if operand.type.is_scalar or (declared and len(given) != len(declared)):
        raise InvalidArgument(f"{where}: dimensions {list(given)} differ in rank from the model's {list(declared)}")
    if any(m not in (0, g) for m, g in zip(declared, given, strict=False) if g):
        raise InvalidArgument(f"{where}: dimensions {list(given)} contradict the model's {list(declared)}")
    return given


def _pool(where: str, argument: RequestArgument, request: Request) -> Memory:
    if argument.pool >= len(request.pools):
        raise InvalidArgument(f"{where}: there is no pool {argument.pool}; the request has {len(request.pools)}")
    pool: Memory = request.pools[argument.pool]
    return pool


def _memory(where: str, argument: RequestArgument, pool: Memory) -> NDArray[np.uint8]:
    """The argument's bytes in its pool."""
    if argument.offset + argument.length > pool.nbytes:
        raise InvalidArgument(f"{where}: {argument.length} bytes at {argument.offset} exceed the pool's {pool.nbytes}")
    return pool.asarray(np.uint8, argument.length, argument.offset)
