"""What a program gets of an execution pickles: errors with all that they say, results with their arrays and names."""

import copy
import inspect
import pickle

import numpy as np
import pytest

import burst
import driver
import driver.errors
import fmq
from burst import ErrorStatus, OutputShape, Result, Timing
from burst.errors import Timeout, status_error
from burst.messages import Cause
from driver import errors, serving

WAYS = {
    **{f"pickle {number}": number for number in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "deepcopy": None,
}
CAUSE = Cause("queued", 0.25, 0.5)
SHAPES = (OutputShape((2, 3), False), OutputShape((), True))
ANSWER = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), SHAPES, message="too small")
ERRORS = [
    *(kind("what happened") for kind in (fmq.FmqError, fmq.Timeout, fmq.Closed, fmq.PeerDied, fmq.Corrupt)),
    *(kind("what happened") for kind in (fmq.RoleTaken, fmq.Busy, fmq.InvalidDescriptor)),
    *(kind("what happened") for kind in (fmq.Evicted, fmq.TooLong)),
    fmq.Overrun(3, 17),
    fmq.NoSpace("what happened"),
    *(kind("what happened") for kind in (burst.BurstError, burst.PeerDied, burst.BuffersLost, burst.Quarantined)),
    *(kind("what happened") for kind in (burst.Malformed, burst.Busy, burst.ResultsHeld, burst.InternalError)),
    burst.NotSent("what happened"),
    Timeout("what happened", "waiting for the answer", 0.125),
    *(status_error(status, "what happened", CAUSE) for status in ErrorStatus if status),
    *(status_error(status, "", CAUSE) for status in ErrorStatus if status),
    *(kind("what happened") for kind in (errors.DriverError, errors.InvalidModel, errors.LoopTimeout)),
    *(kind("what happened") for kind in (errors.DeviceNotFound, errors.DeviceFailed, errors.NotPlaced)),
    errors.ExecutionFailed(3, "ADD", "what happened"),
    errors.OutputInsufficientSize((((2, 3), False), ((4,), True))),
    errors.ImportFailed("what happened", "Loop", 7, remedy="what helps", others=2),
    errors.ImportFailed("what happened"),
    serving.QueueFull("what happened", 0.25),
    driver.CameraFailed("what happened"),
    driver.CameraLost("what happened"),
]


def again(thing, way):
    number = WAYS[way]
    return copy.deepcopy(thing) if number is None else pickle.loads(pickle.dumps(thing, number))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_it_was(error, way):
    """Of the same class, with the same text and the same value of every attribute."""
    found = again(error, way)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_raised_again_by_ray(error):
    """Ray raises, where a result is asked for, a subclass of the error and of its own that has the error as `cause`."""

    class Both(RuntimeError, type(error)):
        def __init__(self, cause):
            self.cause = cause

    again = Both(error)
    assert isinstance(again, type(error))
    assert again.cause is error


def test_every_public_error_is_in_the_table():
    """All that the packages export; a StatusError is always one of its classes."""
    modules = fmq, burst, driver, driver.errors, driver.serving
    public = {getattr(module, name) for module in modules for name in module.__all__}
    wanted = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert wanted - {type(error) for error in ERRORS} == {burst.StatusError}


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_of_an_error_comes_along(way):
    """What `raise_for_status` raises has its whole result, output shapes too."""
    with pytest.raises(burst.StatusError) as caught:
        ANSWER.raise_for_status()
    found = again(caught.value, way)
    assert tuple(found.result) == tuple(ANSWER)
    assert type(found.result) is Result


@pytest.mark.parametrize("way", WAYS)
def test_a_result_in_shared_memory_becomes_a_copy(way, place, kit):
    """Arrays, names and timing are the same, and stay so when the burst writes there again, and when it is closed."""
    with driver.connect() as device, device.prepare(kit.add_model()) as model:
        with model.burst(measure=True) as opened:
            result = opened.run(np.full((1, 4), 1, np.float32))
            found, kept, names = again(result, way), tuple(result.timing), result.outputs.keys()
            del result
            for value in range(40):  # more than there are buffers
                opened.run(np.full((1, 4), value, np.float32))
        assert type(found) is Result
        assert found.status is ErrorStatus.NONE
        assert found.timing == Timing(*kept)
        assert found.outputs[0].tolist() == [[2.0] * 4]
        assert found.outputs.keys() == names
        assert found.outputs[names[0]].tolist() == [[2.0] * 4]
