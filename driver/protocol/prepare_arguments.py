"""The arguments of `prepare`, `restore` and `load` after the model: one record through service and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from driver.deadlines import taken
from driver.options import MEDIUM, check_preference, taken_priority

if TYPE_CHECKING:
    from burst import Trace
    from driver.options import Preference


class PrepareArguments(NamedTuple):
    """In the order in which they travel. The trace is not among the values: it comes as the last descriptor."""

    # Any, as a client may send anything: `VerifiedCache.check` looks at both.
    cache_counts: Any = None  #: [model files, data files] that come with the call; None: no cache
    cache_token: Any = None  #: 32 bytes
    preference: Preference = "fast_single_answer"
    deadline: int | None = None  #: CLOCK_MONOTONIC ns
    priority: int = MEDIUM
    trace: Trace | None = None  #: where the engine notes a crash

    @classmethod
    def from_wire(
        cls,
        cache_counts: Any = None,
        cache_token: Any = None,
        preference: Any = "fast_single_answer",
        deadline: object = None,
        priority: object = MEDIUM,
    ) -> Self:
        """Check the values of a call. Raises ValueError, Malformed, InvalidArgument. Counts and token are checked
        against the cache files later.
        """
        check_preference(preference)
        return cls(cache_counts or None, cache_token, preference, taken(deadline), priority=taken_priority(priority))

    def to_wire(self) -> tuple[object, ...]:
        """Return the values that travel."""
        return self[:-1]
