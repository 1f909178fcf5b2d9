"""Binds the requests of a burst to a driver's prepared model, for `burst.ExecutionBurstServer.create(offer, prepared)`.

In a device's engine the offer knows how: as on every other path, with the client's buffers and charges. Elsewhere, as
in a program that holds both ends of a burst, requests are checked and bound here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from burst import InvalidArgument
from burst.executor import Estimates
from burst.wire import Token
from driver.engine.binding import BoundRequest
from driver.interface import BindOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import BurstOffer, Request
    from burst.execution import Execution
    from driver.interface import PreparedModel
    from driver.options import Priority


def model_binder(prepared: PreparedModel, offer: BurstOffer) -> Callable[[Request], Execution]:
    """Return the function that binds this offer's requests to a driver's prepared model. Raise ValueError."""
    if offer.bind_to is not None:
        return offer.bind_to(prepared)
    model = prepared.prepared_from
    if model is None:
        raise ValueError(
            f"prepared={prepared!r:.80}: it does not say which model it runs; take what Device.prepare returns, or set "
            "its prepared_from to the driver.Model that it was made from"
        )
    options, estimates = BindOptions(priority=cast("Priority", offer.priority)), Estimates()

    def bind(request: Request) -> Execution:
        if any(isinstance(pool, Token) for pool in request.pools):
            raise InvalidArgument("the request names a buffer of the device, and this burst is served outside of one")
        bound = BoundRequest(model, prepared, request, options)
        bound.estimate = estimates.of(request)
        return bound

    return bind
