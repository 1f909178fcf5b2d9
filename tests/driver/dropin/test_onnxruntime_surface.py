"""The drop-in's classes beside the real ones, name by name: arguments, options, providers, what is printed."""

import inspect
import io
import threading
import warnings
from contextlib import redirect_stdout

import numpy as np
import onnxruntime as real
import pytest
from dropin_nets import CPU, bits, endless, feed, ran
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import driver.dropin.onnxruntime as ort


def parameters(method):
    """Of a method: names, kinds and defaults; the words of types are the real ones' own affair."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize("name", ["InferenceSession", "IOBinding"])
def test_methods_take_what_the_real_ones_take(name):
    """By the same names, with the same defaults."""
    ours, its = getattr(ort, name), getattr(real, name)
    changed = [each for each, value in vars(ours).items() if inspect.isfunction(value) and hasattr(its, each)]
    changed = [each for each in changed if each == "__init__" or not each.startswith("__")]
    assert {each: parameters(getattr(ours, each)) for each in changed} == {
        each: parameters(getattr(its, each)) for each in changed
    }


def other_value(value):
    """Another value of its kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | str):
        return value + type(value)(1)
    return next(each for each in type(value).__members__.values() if each != value)


def test_options_are_made_again_with_all_that_was_set():
    """Whatever the real class has: no property and no method that we have not met."""
    options = ort.SessionOptions()
    names = [name for name, value in inspect.getmembers(real.SessionOptions) if isinstance(value, property)]
    for name in names:
        setattr(options, name, other_value(getattr(options, name)))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    again = ort.SessionOptions.of(options.recorded)
    assert {name: getattr(again, name) for name in names} == {name: getattr(options, name) for name in names}
    assert again.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    methods = {name for name, value in inspect.getmembers(real.SessionOptions) if inspect.isroutine(value)}
    told = {"get_session_config_entry", "has_providers"}
    assert {name for name in methods if not name.startswith("_")} <= told | set(vars(ort.SessionOptions))


def outcome_of(module, source, **more):
    """What a program sees of a session that is made: providers and a run, or an error; warnings; what is printed."""
    with warnings.catch_warnings(record=True) as told, redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        try:
            session = module.InferenceSession(source, **more)
            found = session.get_providers(), session.get_provider_options(), bits(session.run(None, feed()))
        except Exception as error:  # noqa: BLE001 (compared)
            found = type(error), str(error)
    return found, {(warning.category, str(warning.message)) for warning in told}, printed.getvalue()


CUDA = "CUDAExecutionProvider"
PROVIDERS = {
    "none": ({"providers": None}, 1),
    "no one": ({"providers": []}, 1),
    "a tuple": ({"providers": (*CPU,)}, 1),
    "absent": ({"providers": [CUDA]}, 1),
    "absent and the CPU": ({"providers": [CUDA, "TensorrtExecutionProvider", *CPU]}, 1),
    "with options": ({"providers": [(CUDA, {"device_id": 1, "arena_extend_strategy": "kSameAsRequested"}), *CPU]}, 1),
    "the CPU with options": ({"providers": [(*CPU, {"use_arena": "0"})]}, 1),
    "options apart": ({"providers": [CUDA, *CPU], "provider_options": [{"device_id": "0"}, {}]}, 1),
    "twice": ({"providers": CPU * 2}, 1),
    "unknown": ({"providers": ["Nope"]}, 0),
    "unknown without a way back": ({"providers": ["Nope"], "enable_fallback": 0}, None),
    "a list in it": ({"providers": [[CUDA, {}]]}, 0),
    "an empty tuple": ({"providers": [()]}, None),
    "a number": ({"providers": 3}, None),
    "a word": ({"providers": "CPU"}, 0),
    "options of another length": ({"providers": CPU, "provider_options": []}, 0),
}


@pytest.mark.parametrize("kind", PROVIDERS)
def test_providers(counted, net, kind):
    """One that is not here is warned of, and the model runs on the CPU: in the device, where ONNX Runtime takes it."""
    more, runs = PROVIDERS[kind]
    assert outcome_of(ort, net, **more) == outcome_of(real, net, **more)
    if runs is not None:
        assert ran(counted) == (runs, 1 - runs)


def test_a_provider_that_is_here(counted, net, monkeypatch):
    """Is the program's: the session stays in it."""
    monkeypatch.setattr(real, "get_available_providers", lambda: [CUDA, *CPU])
    for providers in ([CUDA], [(CUDA, {}), *CPU], None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ort.InferenceSession(net, providers=providers).run(None, feed())
    ort.InferenceSession(net, providers=CPU).run(None, feed())
    assert ran(counted) == (1, 3)
    assert [row["reason"] for row in counted()["in_process"]] == [f"the session may use {CUDA}"]


def test_what_is_no_callback(counted, net):
    """The call itself raises, as the real one's does: class and words."""
    errors = []
    for module in (real, ort):
        session = module.InferenceSession(net, providers=CPU)
        for names, callback in ((None, 3), ("y", print), ([3], print)):
            with pytest.raises(Exception) as found:  # noqa: PT011 (compared)
                session.run_async(names, feed(), callback, None)
            errors.append((found.type, str(found.value).splitlines()[0]))
    assert errors[:3] == errors[3:]


@pytest.mark.integration
def test_a_loop_of_some_seconds_runs_in_the_device(counted, tmp_path):
    """Longer than a device gives a loop of which nobody has said how long it may take."""
    path = endless(tmp_path / "loop.onnx")
    session, options = ort.InferenceSession(path, providers=CPU), ort.RunOptions()
    ends = threading.Timer(3, lambda: setattr(options, "terminate", True))
    ends.start()
    with pytest.raises(Fail, match="terminate flag"):
        session.run(None, {"x": np.ones(1, np.float32), "n": np.array(2**62)}, options)
    ends.join()
    assert ran(counted)[1] == 0
