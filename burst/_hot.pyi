"""What csrc/burst/hot.c, hot_inputs.c, hot_lane.c and hot_socket.c are built to, by hand; they say why."""

from collections.abc import Callable, Sequence
from typing import Any

from burst import Result
from burst.run_queue import Flow

def serve(listener: int, runs: list[Callable[[], object] | None], answer: bytes | None, /) -> int: ...
def copy_alike(places: tuple[Any, ...], arrays: Sequence[Any], /) -> int: ...

class HotBurst:
    def run(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> Result: ...
    def _begin_ready(self, caller: int, keeps: object, locking: object, inputs: dict[str, Any], /) -> None: ...
    def _add_ready(self, result: object, encoded: object, packet: int, nbytes: int, number: int, /) -> bool: ...
    def _forget_ready(self) -> None: ...
    def _copied_bytes(self) -> int: ...

class HotPlan:
    run: Callable[[], object]
    success: bytes | None
    flow: Flow | None
    last_use: int
    has_run: bool
    measure: bool
    enters_itself: bool
    _function: int
    _context: int
    _estimate_at: int
    def _try_claim(self) -> bool: ...
    def _end_claim(self) -> None: ...

class HotLane:
    answered: int
    _running: HotPlan | None
    _flow: Flow | None
    _ticket_at: int
    def _begin_lane(self, begin: int, end: int, attempt: int, plan: type[HotPlan], /) -> None: ...
    def _next_message(self, socket: int, plans: dict[bytes, Any], /) -> tuple[bytes, list[int], int] | None: ...

class HotSocket:
    def _exchange(self, socket: int, number: int, end: int, request: bytes, /) -> bytes | None: ...
