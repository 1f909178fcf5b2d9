"""What csrc/fmq/python is built to, by hand; its hot.c says why."""

from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import disjoint_base

from fmq.span import Span

def start(channel: int, packet: int, nbytes: int, /) -> int: ...

@disjoint_base
class HotEnd:
    spin_ns: int
    hold_ns: int
    _has_readiness: bool
    def _begin_hot(
        self, calls: int, end: int, keeps: object, dtype: np.dtype[Any], capacity: int, span: object, /
    ) -> None: ...
    def _transfer(self, what: str, elements: object, n: int, timeout: float | None, /) -> None: ...

class HotWriter(HotEnd):
    def write(self, elements: ArrayLike, timeout: float | None = None) -> None: ...
    def try_write(self, elements: ArrayLike, /) -> bool: ...
    def reserve(self, n: int, timeout: float | None = None) -> Transaction: ...

class HotReader(HotEnd):
    def read(self, n: int, timeout: float | None = None, out: NDArray[Any] | None = None) -> NDArray[Any]: ...
    def try_read(self, n: int, /) -> NDArray[Any] | None: ...
    def peek(self, n: int, timeout: float | None = None) -> Transaction: ...

@final
class Transaction:
    def __enter__(self) -> Span: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@disjoint_base
class HotExchange:
    def __call__(self, packet: bytes | bytearray | memoryview, deadline: int = ...) -> bytes: ...
    def _begin_hot(self, out: HotWriter, back: HotReader, hold: float, /) -> None: ...
