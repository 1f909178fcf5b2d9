"""How a model is prepared, how a request is executed, and how a burst is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from burst import InvalidArgument
from fmq.end import DEFAULT_SPIN, spin_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from burst import Trace
    from fmq.region import Kind

InputShapes: TypeAlias = "Sequence[tuple[int, ...] | None] | Mapping[str, tuple[int, ...] | None]"
"""Of a model's inputs, by position or by name; None omits one."""
Policy = Literal["block", "reject", "latest"]
Preference = Literal["low_power", "fast_single_answer", "sustained_speed"]
PREFERENCES: tuple[Preference, ...] = get_args(Preference)
Priority = Literal["low", "medium", "high"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""In the order of their numbers, which travel."""

MOST_DEPTH = 64
_MOST_APPLICATION = 100
_SPINS: dict[Preference, float] = {"low_power": 0.0}
_DEPTHS: dict[Preference, int] = {"sustained_speed": 4}


class Cache(NamedTuple):
    """Files for a compilation, as the HAL has them: descriptors, open for reading and writing, that stay yours."""

    token: bytes  #: 32 bytes that stand for the model and for how it is compiled
    model_files: Sequence[int]
    data_files: Sequence[int]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Cache cannot be pickled: its descriptors are of this process; open its files where it is needed"
        )


class PrepareOptions(NamedTuple):
    """How a model is prepared, as `RemoteDevice.prepare` takes and explains it."""

    preference: Preference = "fast_single_answer"
    priority: Priority = "medium"
    deadline: float | None = None  #: a time.monotonic()
    cache: Cache | None = None
    trace: Trace | None = None  #: where the device notes a crash while it prepares

    def checked(self) -> PrepareOptions:
        """Return these options; raise ValueError naming what is wrong."""
        check_preference(self.preference)
        number_of(self.priority)
        return self

    def lasting(self) -> PrepareOptions:
        """Return the options that hold for the same model when it is prepared again."""
        return PrepareOptions(self.preference, self.priority)


class Options(NamedTuple):
    """How a burst is opened, as `prepared.burst` takes and explains it."""

    spin: float | str
    memory: Kind
    measure: bool
    input_shapes: InputShapes | None
    depth: int
    policy: Policy
    recover: bool

    def checked(self) -> Options:
        """Return these options; raise ValueError naming what is wrong."""
        spin_ns(self.spin)
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ValueError(f"depth={self.depth!r}: from 1 to {MOST_DEPTH} requests in flight")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r}: one of {', '.join(map(repr, get_args(Policy)))}")
        return self


def options_of(preference: Preference, **options: Any) -> Options:
    """Return a preference's options, checked; None stands for the defaults of `RemotePreparedModel.burst`. Raises
    ValueError, TypeError.
    """
    spin, depth = _SPINS.get(preference, DEFAULT_SPIN), _DEPTHS.get(preference, 1)
    defaults = Options(spin, "memfd", False, None, depth=depth, policy="block", recover=False)
    if unknown := options.keys() - set(Options._fields):
        raise TypeError(f"burst() takes {', '.join(Options._fields)}, and not {', '.join(sorted(unknown))}")
    return defaults._replace(**{name: value for name, value in options.items() if value is not None}).checked()


LOW, MEDIUM, HIGH = range(len(PRIORITIES))


def check_preference(preference: object) -> None:
    """Raise ValueError if the preference is unknown."""
    if preference not in PREFERENCES:
        raise ValueError(f"preference={preference!r:.40}: one of {', '.join(map(repr, PREFERENCES))}")


def number_of(priority: Priority) -> int:
    """Return the number for this priority on the wire. Raise ValueError."""
    if priority not in PRIORITIES:
        raise ValueError(f"priority={priority!r}: one of {', '.join(map(repr, PRIORITIES))}")
    return PRIORITIES.index(priority)


def check_application(name: object) -> None:
    """Check the name that a client declares for its application. Raise InvalidArgument."""
    if not (isinstance(name, str) and 0 < len(name) <= _MOST_APPLICATION and name.isprintable() and name[0] != "/"):
        raise InvalidArgument(
            f"application={name!r:.120}: must be a str of 1 to {_MOST_APPLICATION} printable characters that does not "
            "begin with / (such names are control groups)"
        )


def taken_priority(plain: object) -> int:
    """Check a priority that a peer has sent. Raise InvalidArgument."""
    if type(plain) is int and 0 <= plain < len(PRIORITIES):
        return plain
    raise InvalidArgument(f"priority {plain!r:.20}: 0, 1 or 2 for {', '.join(PRIORITIES)}")
