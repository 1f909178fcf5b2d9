"""A mixin: what has `close` ends with a `with` block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Callable


class Closing(ProcessBound):
    """Closes itself at the end of a `with` block."""

    __slots__ = ()

    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
