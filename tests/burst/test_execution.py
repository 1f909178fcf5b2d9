"""What a `bind` returns: an `Execution`, or an object of another kind that is taken for one."""

from types import SimpleNamespace

import pytest

from burst import ErrorStatus, GeneralFailure, OutputShape
from burst.adapted import as_execution, cancel_of
from burst.execution import Execution

OPTIONAL = {name for name in (*Execution.__annotations__, *vars(Execution)) if not name.startswith("_")} - {
    *("run", "shapes", "is_static")
}


def plain(**more):
    """An object with no more than an execution must have."""
    return SimpleNamespace(run=lambda: "ran", shapes=(OutputShape((1,)),), is_static=False, **more)


def test_an_execution_is_taken_as_it_is():
    """Nothing is put around it."""

    class Own(Execution):
        pass

    own = Own()
    assert as_execution(own) is own


def test_what_another_object_lacks_has_its_default():
    """It needs not inherit, and says only what it can."""
    found = as_execution(plain())
    assert (found.run(), found.shapes, found.is_static) == ("ran", (OutputShape((1,)),), False)
    values = {name: getattr(found, name) for name in OPTIONAL - {"cancel", "failure"}}
    assert values == {name: getattr(Execution, name) for name in values}
    assert found.cancel() is None
    assert isinstance(found.failure(ErrorStatus.GENERAL_FAILURE), GeneralFailure)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_all_that_another_object_says_is_known(name):
    """Each attribute that an execution may have; None is the same as none."""
    said = object()
    assert getattr(as_execution(plain(**{name: said})), name) is said
    default, none = getattr(as_execution(plain()), name), getattr(as_execution(plain(**{name: None})), name)
    assert none == default or callable(none)


def test_shapes_and_times_follow_each_run():
    """They are asked after a run."""
    other = plain(time_on_device=1)
    found = as_execution(other)
    other.shapes, other.time_on_device = (OutputShape((2,)),), 2
    assert (found.shapes, found.time_on_device) == ((OutputShape((2,)),), 2)


def test_an_executor_without_cancel_goes_on():
    """One that has it is called."""
    calls = []
    assert cancel_of(SimpleNamespace())() is None
    cancel_of(SimpleNamespace(cancel=lambda: calls.append("cancel")))()
    assert calls == ["cancel"]
