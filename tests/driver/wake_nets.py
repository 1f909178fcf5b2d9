"""Small nets of the shapes of openWakeWord's: the wake word is a tone of 1 kHz that goes on for a while.

And what they make of a whole clip at once, in numpy.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RATE, STEP = 16000, 1280
_KERNEL = (np.sin(2 * np.pi * 1000 * np.arange(640) / RATE) / 320).astype(np.float32)
_GAIN, _BIAS = 0.1, 20.0


def save(path, nodes, takes, gives, **weights):
    """takes, gives: the shapes of the one input and of the one output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sides = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("input", takes), ("output", gives))]
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "graph", *sides, initializer=initial)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_features(folder, bins=32):
    """melspectrogram.onnx and embedding_model.onnx."""
    nodes = [
        helper.make_node("Unsqueeze", ["input", "one"], ["wide"]),
        helper.make_node("Conv", ["wide", "kernel"], ["found"], strides=[160]),
        helper.make_node("Abs", ["found"], ["loud"]),
        helper.make_node("Transpose", ["loud"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Unsqueeze", ["turned", "one"], ["output"]),
    ]
    kernel, one = np.tile(_KERNEL, (bins, 1, 1)), np.array([1], np.int64)
    save(folder / "melspectrogram.onnx", nodes, ("b", "n"), ("t", 1, "m", bins), kernel=kernel, one=one)
    nodes = [
        helper.make_node("Transpose", ["input"], ["turned"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["turned", "kernel"], ["found"]),
        helper.make_node("Transpose", ["found"], ["output"], perm=[0, 2, 3, 1]),
    ]
    kernel = np.full((96, 1, 76, bins), 1 / 76 / bins, np.float32)
    save(folder / "embedding_model.onnx", nodes, ("n", 76, bins, 1), ("n", 1, 1, 96), kernel=kernel)


def write_word(path, window=16, classes=1, bias=_BIAS):
    """It is sure when the tone has lasted for about half a second."""
    nodes = [
        helper.make_node("Flatten", ["input"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights", "bias"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["output"]),
    ]
    weights = np.full((window * 96, classes), _GAIN / window / 96, np.float32)
    biases = np.full(classes, -bias, np.float32)
    save(path, nodes, (1, window, 96), (1, classes), weights=weights, bias=biases)


def write_models(folder, word="tone_v0.1"):
    """The three files, and the path of the word."""
    write_features(folder)
    write_word(folder / f"{word}.onnx")
    return folder / f"{word}.onnx"


def tone(seconds, rate=RATE, amplitude=10000):
    return (amplitude * np.sin(2 * np.pi * 1000 * np.arange(round(seconds * rate)) / rate)).astype(np.int16)


def silence(seconds, rate=RATE):
    return np.zeros(round(seconds * rate), np.int16)


def speech(*parts):
    """Silence, tone, silence, … of so many seconds."""
    return np.concatenate([(silence, tone)[n % 2](seconds) for n, seconds in enumerate(parts)])


def _frames(samples):
    windows = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), 640)[::160]
    return np.abs(windows @ _KERNEL) / 10 + 2


def activations(samples, window=16):
    """Of a whole clip, one for each 80 ms: the definition, without any state."""
    noise = _frames(np.random.RandomState(0).randint(-1000, 1000, 4 * RATE))
    past = [noise[n : n + 76].mean() for n in range(0, len(noise) - 75, 8)]
    steps = len(samples) // STEP
    frames = np.concatenate((np.ones(76), _frames(samples[: steps * STEP])))
    embeddings = past + [frames[: 76 + 5 + 8 * n][-76:].mean() for n in range(steps)]
    means = [np.mean(embeddings[: len(past) + n + 1][-window:]) for n in range(steps)]
    found = 1 / (1 + np.exp(-(_GAIN * np.array(means) - _BIAS)))
    found[:5] = 0
    return found
