"""A base of what belongs to one process, and says so where it is pickled or copied."""

from __future__ import annotations

from typing import Any, ClassVar


class ProcessBound:
    """It holds what another process does not have: descriptors, mappings, threads, connections."""

    __slots__ = ()

    to_send: ClassVar[str] = "make another one where it is needed"  #: what to do in place of sending it

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self).__name__
        raise TypeError(f"a {kind} belongs to this process, and cannot be pickled: {self.to_send}")
