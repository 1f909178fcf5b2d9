"""Whether a served device answers, seen by a client that connects from outside."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from burst import ResourceExhaustedTransient
from driver.client import served_sockets
from driver.errors import DeviceFailed
from driver.protocol.greeting import Greeting
from driver.protocol.rpc import PROTOCOL, call


def check(address: str, within: float) -> str:
    """Ask a device, and describe its answer. Raise DeviceNotFound, DeviceFailed, BurstError."""
    found: SimpleQueue[str | Exception] = SimpleQueue()
    threading.Thread(target=_look, args=(address, within, found), daemon=True).start()
    try:
        answer = found.get(timeout=within)  # connecting blocks for ever if no process accepts
    except Empty:
        raise DeviceFailed(f"{address}: it did not answer within {within:g} s; see its log, or restart it") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _look(address: str, within: float, found: SimpleQueue[str | Exception]) -> None:
    try:
        found.put(_greet(address, within))
    except Exception as error:  # noqa: BLE001 (`check` raises it)
        found.put(error)


def _greet(address: str, within: float) -> str:
    with served_sockets.connect(address) as channel:
        try:
            values, _ = call(channel, "hello", PROTOCOL, timeout=within)
        except ResourceExhaustedTransient as error:
            return f"it answers, but takes no more clients: {error}"
    told = Greeting.from_wire(values)
    return f"{told.name}, version {told.version}, answers"
