"""The one count of the clients of a device: by account, against the limits on connections."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from driver.engine.limits import Limits

_REMEDY = "close connections"
_KEPT = 4  # a quarter of the connections is kept for accounts that have few


class ClientCensus:
    """The connected clients of each account. Safe from any thread."""

    def __init__(self, limits: Limits | None) -> None:
        """`limits`: None in a cell, whose clients the broker has admitted."""
        self._limits, self._clients, self._lock = limits, Counter[int](), threading.Lock()

    def enter(self, uid: int) -> None:
        """Count a client. Raise ResourceExhaustedTransient if its account, or the device, may have no more.

        Accounts that have many leave room: each account that there may be gets a few connections, whatever others hold.
        """
        with self._lock:
            if self._limits:
                self._check(self._limits, uid)
            self._clients[uid] += 1

    def _check(self, limits: Limits, uid: int) -> None:
        limits.check("uid_clients", self._clients[uid], _REMEDY)
        kept, remedy = limits.device_clients // _KEPT, _REMEDY
        few = kept // limits.device_accounts
        if self._clients[uid] < few or not few:
            kept = 0
        else:
            remedy = f"{kept} are kept for accounts with fewer than {few}; {_REMEDY}"
        limits.check("device_clients", self._clients.total(), remedy, 1 + kept)

    def leave(self, uid: int, clients: int = 1) -> None:
        """Note that so many clients of an account have left."""
        with self._lock:
            self._clients -= Counter({uid: clients})  # drops accounts without clients

    def count(self, uid: int) -> int:
        """Return how many clients of that account are connected."""
        with self._lock:
            return self._clients[uid]

    def total(self) -> int:
        """Return how many clients are connected."""
        with self._lock:
            return self._clients.total()
