"""How somebody wants a burst."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from fmq.end import spin_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fmq.region import Kind

Policy = Literal["block", "reject", "latest"]
Preference = Literal["low_power", "fast_single_answer", "sustained_speed"]
_MOST_DEPTH = 64


class Options(NamedTuple):
    """As `prepared.burst` takes and explains them."""

    spin: float | str
    memory: Kind
    measure: bool
    input_shapes: Sequence[tuple[int, ...] | None] | None
    depth: int
    policy: Policy
    recover: bool

    def checked(self) -> Options:
        """Raises ValueError naming what is wrong."""
        spin_ns(self.spin)
        if not 1 <= self.depth <= _MOST_DEPTH:
            raise ValueError(f"depth={self.depth!r}: from 1 to {_MOST_DEPTH} requests in flight")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r}: one of {', '.join(map(repr, get_args(Policy)))}")
        return self
