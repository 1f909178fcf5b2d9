"""The arguments of `prepare`, `restore` and `load` after the model: one record through service and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import Malformed
from driver.deadlines import taken
from driver.options import LONGEST_WINDOW, MEDIUM, MOST_ROWS, check_preference, taken_priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Trace
    from driver.options import Preference


_LONGEST_WINDOW = int(LONGEST_WINDOW * 1e9)  # ns


class ThreadsFound(NamedTuple):
    """The numbers of threads that a model was found to run best with, by the pace of its requests; 0: not known."""

    in_a_row: int = 0
    in_a_stream: int = 0

    @property
    def usual(self) -> int:
        """The number for a model of whose requests nothing is known yet."""
        return self.in_a_stream or self.in_a_row

    def at(self, *, is_stream: bool) -> int:
        """Return the number for a pace."""
        return self.in_a_stream if is_stream else self.in_a_row

    def with_number(self, threads: int, *, is_stream: bool) -> Self:
        """Return these with another number for a pace."""
        return self._replace(in_a_stream=threads) if is_stream else self._replace(in_a_row=threads)


NOTHING_FOUND = ThreadsFound()


class SavedTerms(NamedTuple):
    """How a model was prepared that is kept in cache files."""

    preference: Preference = "fast_single_answer"
    priority: int = MEDIUM
    found: ThreadsFound = NOTHING_FOUND

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Self:
        """Return the terms from what msgpack read."""
        terms = cls(*plain)
        return terms._replace(found=ThreadsFound(*terms.found))


class JoinTerms(NamedTuple):
    """How executions are joined with those of others on an equal model, for clients with equal terms."""

    rows: int  #: the most in one run
    window: int  #: ns that a request which finds the device idle waits for others
    pads: bool  #: sequences whose lengths differ

    @classmethod
    def taken(cls, plain: object) -> Self | None:
        """Check the terms that a peer has sent; None: it sent none. Raise Malformed."""
        match plain:
            case None:
                return None
            case [int(rows), int(window), bool(pads)] if 2 <= rows <= MOST_ROWS and 0 <= window <= _LONGEST_WINDOW:
                return cls(rows, window, pads)
        raise Malformed(
            f"batch {plain!r:.80}: nil, or rows from 2 to {MOST_ROWS}, nanoseconds to {_LONGEST_WINDOW}, and whether "
            "sequences are padded"
        )


class PrepareArguments(NamedTuple):
    """In the order in which they travel. The trace is not among the values: it comes as the last descriptor."""

    # Any, as a client may send anything: `VerifiedCache.check` looks at both.
    cache_counts: Any = None  #: [model files, data files] that come with the call; None: no cache
    cache_token: Any = None  #: 32 bytes
    preference: Preference = "fast_single_answer"
    deadline: int | None = None  #: CLOCK_MONOTONIC ns
    priority: int = MEDIUM
    batch: JoinTerms | None = None
    trace: Trace | None = None  #: where the engine notes a crash
    takes_saved: tuple[bool, bool] = (False, False)  #: whether preference and priority are those of the saved model

    @classmethod
    def from_wire(
        cls,
        cache_counts: Any = None,
        cache_token: Any = None,
        preference: Any = "fast_single_answer",
        deadline: object = None,
        priority: object = MEDIUM,
        batch: object = None,
        *,
        restores: bool = False,
    ) -> Self:
        """Check the values of a call. Raise ValueError, Malformed, InvalidArgument. Counts and token are checked
        against the cache files later. `restores`: preference and priority may be None, those of the saved model.
        """
        takes_saved = restores and preference is None, restores and priority is None
        preference, priority = (
            default if is_saved else given
            for given, default, is_saved in zip(
                (preference, priority), ("fast_single_answer", MEDIUM), takes_saved, strict=True
            )
        )
        check_preference(preference)
        number = taken_priority(priority)
        return cls(
            cache_counts or None,
            cache_token,
            preference,
            taken(deadline),
            priority=number,
            batch=JoinTerms.taken(batch),
            takes_saved=takes_saved,
        )

    def to_wire(self) -> tuple[object, ...]:
        """Return the values that travel."""
        counts, token, preference, deadline, priority, batch, *_ = self
        is_preference_saved, is_priority_saved = self.takes_saved
        terms = None if is_preference_saved else preference, None if is_priority_saved else priority
        return counts, token, terms[0], deadline, terms[1], batch


WIRE_LENGTH = len(PrepareArguments().to_wire())
"""The number of values that travel."""
