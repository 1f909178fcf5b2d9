"""Words that espeak-ng speaks, through openWakeWord's own code and through ours."""

import asyncio
import shutil
import subprocess
import sys
import warnings
from functools import cache

import numpy as np
import pytest
from ai_edge_litert import interpreter
from needed_tools import give_up
from openwakeword_itself import their_model
from openwakeword_models import fetch
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.wake import Detect, Detection, NotDetected

from driver.errors import DeviceFailed
from driver.gateways.wyoming.wake_models import WakeModels, read_models
from driver.gateways.wyoming.wake_server import WakeServer
from driver.gateways.wyoming.wake_stream import WakeStream

pytestmark = pytest.mark.integration

WORDS = ["hey_jarvis_v0.1", "alexa_v0.1", "weather_v0.1"]
SPOKEN = {"hey_jarvis_v0.1": "hey jarvis", "alexa_v0.1": "alexa", "weather_v0.1": "what's the weather like today"}
VOICES = ["en-us", "en-gb"]


KINDS = {".tflite": "litert", ".onnx": "onnxruntime"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the models."""
    folder = tmp_path_factory.mktemp("openwakeword")
    fetch(folder)
    return folder


def words_of(models, kind):
    return [models / f"{word}{kind}" for word in WORDS]


@cache
def said(text, voice):
    """What espeak-ng says, at 16 kHz, with a second of silence around it."""
    if not shutil.which("espeak-ng"):
        give_up("espeak-ng is missing; install it (Debian: apt install espeak-ng)")
    done = subprocess.run(["espeak-ng", "-v", voice, "--stdout", text], check=True, capture_output=True)
    samples = np.frombuffer(done.stdout[44:], np.int16).astype(float)
    there = np.arange(0, len(samples), 22050 / 16000)
    spoken = np.interp(there, np.arange(len(samples)), samples).astype(np.int16)
    return np.concatenate((np.zeros(16000, np.int16), spoken, np.zeros(16000, np.int16)))


def theirs(models, kind, clip):
    """The activations of openWakeWord's own code, a row for each 80 ms."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("ignore")
        its = their_model(patched, interpreter, models, words_of(models, kind), kind)
    steps = [its.predict(clip[begin : begin + 1280]) for begin in range(0, len(clip) - 1279, 1280)]
    return np.array([[step[word] for word in WORDS] for step in steps])


def ours(models, kind, clip, size):
    async def main():
        async with WakeModels(read_models(words_of(models, kind)), KINDS[kind], 4) as on_device:
            stream, found = WakeStream(on_device), []
            for begin in range(0, len(clip), size):
                found.extend([each async for each in stream.feed(clip[begin : begin + size], WORDS)])
            return np.array([[step[word] for word in WORDS] for step in found])

    return asyncio.run(main())


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_activations_of_openwakeword(models, kind, word, voice):
    """Each 80 ms of a spoken word have bit for bit the activations that openWakeWord's own code gives, by the same
    library: ONNX Runtime for .onnx files, LiteRT for .tflite files.
    """
    clip = said(SPOKEN[word], voice)
    expected = theirs(models, kind, clip)
    assert expected[:, WORDS.index(word)].max() > 0.9  # it was understood
    np.testing.assert_array_equal(ours(models, kind, clip, 1024), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_spoken_to_the_server(models, kind):
    """wyoming's own client hears of each spoken word once, by its name, and of nothing where none is spoken."""

    async def hear(uri, words, clip):
        async with AsyncClient.from_uri(uri) as client:
            await client.write_event(Detect(names=words).event())
            await client.write_event(AudioStart(16000, 2, 1).event())
            for begin in range(0, len(clip), 1024):
                await client.write_event(AudioChunk(16000, 2, 1, clip[begin : begin + 1024].tobytes()).event())
            await client.write_event(AudioStop().event())
            return await asyncio.wait_for(client.read_event(), 60)

    async def main():
        async with WakeServer(KINDS[kind], words_of(models, kind), "tcp://127.0.0.1:0") as server:
            for word in WORDS:
                event = await hear(server.uri, None, said(SPOKEN[word], "en-us"))
                assert Detection.from_event(event).name == word
            event = await hear(server.uri, ["alexa"], said("good morning everyone", "en-us"))
            assert NotDetected.is_type(event.type)
            event = await hear(server.uri, ["alexa"], said("hey jarvis", "en-us"))
            assert NotDetected.is_type(event.type)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_of_the_package(models, kind):
    """Files of the same folder that are no wake word's are refused: a voice detector, a model of seven classes."""
    for path in (
        models / f"{name}{kind}" for name in ("silero_vad", "timer_v0.1", "embedding_model", "melspectrogram")
    ):
        if path.exists():
            with pytest.raises(DeviceFailed, match="no wake word's model"):
                read_models([path])


def test_the_whole_package(models, tmp_path):
    """A folder gives all its wake words; two kinds of file in it are one too many."""
    with pytest.raises(DeviceFailed, match=r"\.onnx and \.tflite files are given"):
        read_models([models])
    for path in models.glob("*.tflite"):
        if not path.stem.startswith("timer"):
            (tmp_path / path.name).symlink_to(path)
    assert {*WORDS, "hey_mycroft_v0.1"} < {word.name for word in read_models([tmp_path]).words}


def test_a_device_for_other_files(models):
    """The command says which device takes the files, and exits with 2."""
    command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", "--wyoming", "tcp://:0", "--wake-word"]
    done = subprocess.run([*command, models / "alexa_v0.1.tflite"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs the device litert" in " ".join(done.stderr.split())
