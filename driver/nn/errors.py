"""What can go wrong with a network.

DriverError
├── InvalidModel (also ValueError)   the model breaks a rule; nothing was prepared
├── ExecutionFailed                  an operation could not be computed
├── LoopTimeout                      a WHILE went on for too long
└── OutputInsufficientSize           an output buffer is too short for its result
"""

from collections.abc import Iterable
from typing import Any

OutputShapes = tuple[tuple[tuple[int, ...], bool], ...]
"""(dimensions, is_sufficient) of every output of a model."""


class DriverError(Exception):
    """Base of everything raised on purpose by the driver package."""


class InvalidModel(DriverError, ValueError):
    """A model breaks a rule of the HAL, or a builder was asked for an impossible operand.

    Raised by `validate`, `ModelBuilder` and `Interpreter`. The builder stays usable: the call changed nothing.
    """


class ExecutionFailed(DriverError):
    """An operation met values or shapes that it cannot compute (HAL: GENERAL_FAILURE).

    Raised by `Interpreter.bind` and by `Bound.run`. The interpreter and its other bindings stay usable; the contents of
    the outputs of this run are unspecified.
    """

    def __init__(self, index: int, operation: str, reason: str) -> None:
        super().__init__(f"operation {index} ({operation}): {reason}")
        self.index = index
        self.operation = operation
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.operation, self.reason)


class LoopTimeout(DriverError):
    """A WHILE went on for longer than its loop timeout (HAL: MISSED_DEADLINE_TRANSIENT).

    Raised by `Bound.run`. The interpreter and its bindings stay usable; nothing was written to the loop's outputs.
    """


class OutputInsufficientSize(DriverError):
    """At least one output buffer is shorter than the result that belongs in it.

    Raised by `Bound.run`. `shapes` holds (dimensions, is_sufficient) per output, so that the caller can bind again with
    larger buffers; nothing was written beyond any buffer.
    """

    def __init__(self, shapes: OutputShapes) -> None:
        short = [f"output {i} needs dimensions {list(d)}" for i, (d, enough) in enumerate(shapes) if not enough]
        super().__init__("; ".join(short) + ": bind a larger buffer")
        self.shapes = shapes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shapes,)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Name the spelling closest to `name`, as the end of an error message; empty when nothing is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
