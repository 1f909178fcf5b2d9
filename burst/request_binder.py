"""Finds what binds the requests of a burst, in what `ExecutionBurstServer.create` is given."""

from __future__ import annotations

import inspect
from functools import singledispatch
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst.execution import Execution
    from burst.execution_burst import BurstOffer
    from burst.messages import Request

    Bind = Callable[[Request], Execution]

_REMEDY = "give a driver.PreparedModel, or an object whose method bind takes one request and returns its execution"


@runtime_checkable
class Bindable(Protocol):
    """An object that binds the requests of a burst."""

    def bind(self, request: Request, /) -> Execution:
        """Bind a request, whose pools are `Memory`, mapped once per slot, or `Token`. Raise StatusError."""


@singledispatch
def request_binder(prepared: object, _: BurstOffer) -> Bind:
    """Return the function that binds this offer's requests to `prepared`. Raise ValueError for what cannot.

    The package that defines a class of prepared models registers how requests are bound to them.
    """
    if fault := _fault(prepared):
        raise ValueError(f"prepared={prepared!r:.80}: {fault}; {_REMEDY}")
    bindable: Bindable = prepared  # type: ignore[assignment]  # that is what was looked at
    return bindable.bind


def _fault(prepared: object) -> str | None:
    """Return why this binds no requests; None: it does."""
    if not isinstance(prepared, Bindable) or not callable(prepared.bind):
        return "it has no method bind"
    try:
        signature = inspect.signature(prepared.bind)
    except (TypeError, ValueError):  # a function in C tells none
        return None
    try:
        signature.bind(None)
    except TypeError:
        return f"its bind takes ({', '.join(signature.parameters)}), not one request"
    return None


@request_binder.register(type(None))
def _own_binder(prepared: None, offer: BurstOffer) -> Bind:
    if offer.bind is None:
        raise ValueError(f"prepared={prepared}: this offer has no `bind` of its own; {_REMEDY}")
    return offer.bind
