"""How a model is prepared, how a request is executed, and how a burst is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

from burst import InvalidArgument
from driver.deadlines import check_times
from fmq.end import DEFAULT_SPIN, spin_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from burst import Trace
    from driver.nn import Model
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
MOST_ROWS, LONGEST_WINDOW = 2**12, 1.0  # of a joined run, and seconds to wait for others
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


class Batch(NamedTuple):
    """How waiting requests of several clients become one run, along the open first dimension of their model.

    A request waits for no other one while the device is idle; those that come while it computes run together next. All
    clients of an account that give equal terms for equal models ride together. The results have the bits of the joined
    run: sums may be rounded in another order than in a run alone, and with a mask padding takes part.
    """

    rows: int = 32  #: the most in one run
    window: float = 0.0  #: seconds that a request which finds the device idle waits for others
    mask: str | None = None
    """The input that is 0 where a sequence has ended. With it, sequences of different lengths are joined: every input
    whose second dimension is open is padded with zeros, at most an eighth of a run. None: lengths have to be equal."""

    def checked(self, model: Model) -> Batch:
        """Return these terms; raise ValueError, naming what is wrong with them or with the model."""
        if not (is_integer(self.rows) and 2 <= self.rows <= MOST_ROWS):
            raise ValueError(f"batch.rows={self.rows!r:.40}: an integer from 2 to {MOST_ROWS}")
        if not 0 <= self.window <= LONGEST_WINDOW:
            raise ValueError(f"batch.window={self.window!r:.40}: seconds from 0 to {LONGEST_WINDOW:g}")
        check_open_batch(model, self.rows)
        tensors = {tensor.name: tensor for tensor in model.inputs}
        if self.mask is not None and self.mask not in tensors:
            raise ValueError(f"batch.mask={self.mask!r:.80}: no input has that name; one of {', '.join(tensors)}")
        shape = None if self.mask is None else tensors[self.mask].shape
        if shape is not None and (len(shape) < 2 or shape[1] is not None):
            raise ValueError(
                f"batch.mask={self.mask!r}: the second dimension of {tensors[self.mask or '']} is not open"
            )
        return self


def check_open_batch(model: Model, batch: int) -> None:
    """Raise ValueError for a model that takes no batch of any size."""
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            if tensor.shape is not None and (not tensor.shape or tensor.shape[0] is not None):
                raise ValueError(
                    f"batch={batch}: {kind} {tensor} has no open first dimension, along which requests could be "
                    "joined; export the model with a dynamic batch, or leave batch out"
                )


def is_integer(given: object) -> TypeGuard[int]:
    """Return True for an int that is no bool."""
    return isinstance(given, int) and not isinstance(given, bool)


class PrepareOptions(NamedTuple):
    """How a model is prepared, as `RemoteDevice.prepare` takes and explains it."""

    preference: Preference = "fast_single_answer"
    priority: Priority = "medium"
    deadline: float | None = None  #: a time.monotonic()
    cache: Cache | None = None
    trace: Trace | None = None  #: where the device notes a crash while it prepares
    batch: Batch | None = None

    def checked(self, model: Model | None = None) -> PrepareOptions:
        """Return these options; raise ValueError naming what is wrong. `model`: that the batch is of."""
        check_preference(self.preference)
        number_of(self.priority)
        if self.batch is not None and model is not None:
            self.batch.checked(model)
        return self

    def lasting(self) -> PrepareOptions:
        """Return the options that hold for the same model when it is prepared again."""
        return PrepareOptions(self.preference, self.priority, batch=self.batch)


class Options(NamedTuple):
    """How a burst is opened, as `prepared.burst` takes and explains it."""

    spin: float | str
    memory: Kind
    measure: bool
    input_shapes: InputShapes | None
    depth: int
    policy: Policy
    recover: bool
    loop_timeout: float | None = None

    def checked(self) -> Options:
        """Return these options; raise ValueError naming what is wrong."""
        spin_ns(self.spin)
        check_times(loop_timeout=self.loop_timeout)
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
