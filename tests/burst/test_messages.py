"""The vocabulary of one execution and its errors."""

import inspect
import pickle
import re

import pytest

from burst import Result, errors
from burst.messages import Cause, ErrorStatus, OutputShape, Request, RequestArgument, Timing
from fmq.errors import PeerDied as QueuePeerDied

STATUS_CLASSES = {
    ErrorStatus.DEVICE_UNAVAILABLE: errors.DeviceUnavailable,
    ErrorStatus.GENERAL_FAILURE: errors.GeneralFailure,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: errors.OutputInsufficientSize,
    ErrorStatus.INVALID_ARGUMENT: errors.InvalidArgument,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: errors.MissedDeadlineTransient,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: errors.MissedDeadlinePersistent,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: errors.ResourceExhaustedTransient,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: errors.ResourceExhaustedPersistent,
}
FAILURES = list(STATUS_CLASSES)


def test_status_numbers():
    """The statuses have the numbers of the HAL, in its order."""
    assert [status.value for status in ErrorStatus] == list(range(9))
    assert [ErrorStatus.NONE, *FAILURES] == list(ErrorStatus)


@pytest.mark.parametrize("status", FAILURES)
def test_every_status_has_its_own_exception(status):
    """Every status but NONE has a class of its own, with that status and a message that says it and what helps."""
    error = errors.status_error(status)
    assert type(error) is STATUS_CLASSES[status]
    assert error.status is status
    assert error.result is None
    assert error.remedy
    assert str(error) == f"{status.name}; {error.remedy}"
    said = "out of paper" if status <= ErrorStatus.INVALID_ARGUMENT else f"out of paper; {error.remedy}"
    assert str(errors.status_error(int(status), "out of paper")) == said
    assert str(errors.status_error(status, said)) == said
    assert error.phase is error.late_by is None
    assert (error.retry_after is not None) == status.name.endswith("TRANSIENT")


def test_an_error_says_where_it_was_and_by_how_much():
    """Phase, lateness and the device's hint are attributes, and words where the device has none."""
    error = errors.status_error(5, cause=Cause("executing", 0.0125, 0.5))
    assert (error.phase, error.late_by, error.retry_after) == ("executing", 0.0125, 0.5)
    assert str(error) == f"MISSED_DEADLINE_TRANSIENT (executing), late by 12.5 ms; {error.remedy}"
    assert errors.status_error(6, cause=Cause("before start", None, 0.5)).retry_after is None


@pytest.mark.parametrize("status", [ErrorStatus.NONE, 9, -1])
def test_no_exception_for_what_is_not_a_failure(status):
    """Success has no exception, and neither has a number that is no status."""
    with pytest.raises(ValueError, match=r"NONE|not a valid ErrorStatus"):
        errors.status_error(status)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.PeerDied, QueuePeerDied),
        (errors.PeerDied, ConnectionError),
        (errors.Malformed, ValueError),
        (errors.Timeout, TimeoutError),
        (errors.OutputInsufficientSize, BufferError),
        (errors.InvalidArgument, ValueError),
        (errors.MissedDeadlineTransient, TimeoutError),
        (errors.MissedDeadlinePersistent, TimeoutError),
    ],
)
def test_errors_are_caught_where_python_users_look(error, base):
    """An error that Python has a name for is caught by that name, and keeps its message."""
    with pytest.raises(base, match="why"):
        raise error("why")


def test_the_drawn_tree_is_the_tree():
    """The tree in the docstring names every class of the module, under its base."""
    drawn, path = {}, []
    for stem, name in re.findall(r"^    ([ │├└─]*)(\w+)", errors.__doc__, re.MULTILINE):
        path[len(stem) // 4 :] = [name]
        drawn[name] = path[-2] if len(path) > 1 else "Exception"
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.BurstError)]
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in classes}


def test_success_raises_nothing():
    """A result whose status is NONE raises nothing."""
    Result(ErrorStatus.NONE).raise_for_status()


@pytest.mark.parametrize("status", FAILURES)
def test_failure_raises_with_the_result(status):
    """A failed result raises its status's class and hangs on it, so that a handler sees the shapes."""
    result = Result(status, output_shapes=(OutputShape((7,), is_sufficient=False),))
    with pytest.raises(STATUS_CLASSES[status]) as caught:
        result.raise_for_status()
    assert caught.value.result is result


@pytest.mark.parametrize("status", FAILURES)
def test_status_errors_pickle(status):
    """A status error crosses processes with its class, message and result."""
    error = errors.status_error(status, "why", Cause("queued", 0.5, 0.25))
    error.result = Result(status, timing=Timing(1, 2))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.as_cause() == error.as_cause()
    assert (copy.result.status, copy.result.timing) == (status, Timing(1, 2))


def test_defaults_mean_nothing_is_known():
    """What is not said is not measured, not located, not shaped, and sufficient."""
    assert Timing() == (None, None)
    assert OutputShape() == ((), True)
    assert RequestArgument() == (False, 0, 0, 0, ())
    assert Request((), ()).pools == ()
    assert Result(ErrorStatus.NONE).timing == Timing()


def test_requests_compare_and_hash_by_value():
    """Two requests that say the same are the same key, so that an encoded packet can be remembered for them."""
    pool = object()
    one, two = (Request((RequestArgument(length=4),), (RequestArgument(True),), (pool,)) for _ in range(2))
    assert {one: "packet"}[two] == "packet"
    assert one != two._replace(pools=(object(),))


def test_a_result_has_no_room_for_stray_attributes():
    """A misspelt attribute of a result is refused, not remembered."""
    with pytest.raises(AttributeError):
        Result(ErrorStatus.NONE).output = ()
