"""A device whose engine lies to those who watch it, as what has taken an engine over may."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from driver.devices.reference import ReferenceDevice
from driver.engine.client import EngineClient
from driver.engine.process import Engine
from driver.protocol.rpc import Reply

if TYPE_CHECKING:
    from driver.interface import Preparation, PreparedModel
    from driver.nn import Model

_ENDS = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
_ROW = [7, None, {"bytes": 1}, {}]


class Liar(ReferenceDevice):
    """Begins to lie when it prepares a model of so many MUL: with 1 about figures, with 2 about their number, with 3 by
    sockets in the place of traces, with 4 by a ledger without an end, with 5 by one of other things than numbers.
    """

    name = "liar"

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        match sum(operation.type == "MUL" for operation in model.main.operations):
            case 1:
                Engine.figures = lambda *_: Reply([1, 0, "x", [], {}])  # type: ignore[method-assign]
            case 2:
                Engine.figures = lambda *_: Reply([1, 0, [[1.0]], 1, 1])  # type: ignore[method-assign]
            case 3:
                EngineClient.traces = lambda *_: Reply([1 << 40], [_ENDS[0].fileno()])  # type: ignore[method-assign]
            case 4:
                EngineClient.ledger = lambda *_: Reply([1 << 40, {}, [_ROW] * 100])  # type: ignore[method-assign]
            case 5:
                EngineClient.ledger = lambda *_: Reply([1, {}, [[7, None, {"bytes": "x"}, 5]]])  # type: ignore[method-assign]
        return super().prepare(model, preparation)
