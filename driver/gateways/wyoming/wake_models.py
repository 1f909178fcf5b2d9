"""openWakeWord's models: two that make features of sound, and one for each wake word. All satellites share them.

melspectrogram     [1, samples]       -> [1, 1, frames, 32], a frame for each 10 ms
embedding_model    [n, 76, 32, 1]     -> [n, 1, 1, 96], for 76 frames
a wake word's      [1, 16, 96]        -> [1, 1], how sure it is from 0 to 1; some take more embeddings than 16

All are .tflite files, or all are .onnx files, as the device takes them.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from burst import BurstError
from driver.errors import DeviceFailed, ImportFailed
from driver.importers import load
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.nn import Model
    from driver.replicas import ModelServer

    Floats = NDArray[np.float32]

BINS, FRAMES, FEATURES = 32, 76, 96
STEP = 1280
"""Samples of one step, 80 ms, which is 8 frames."""
CONTEXT = 480
"""Samples before a step that its frames reach back to."""
FEATURE_FILES = "melspectrogram", "embedding_model"
KINDS = ".tflite", ".onnx"
"""Of files. Words and features are of one kind, since a device takes one, and openWakeWord mixes none either."""

_NOISE = 4 * 16000
_FIRST = 41  # embeddings of the noise
_WITHIN = 30.0  # seconds for one execution, a new start of the device included
_PAUSES = 0.2, 1.0, 3.0  # seconds before an execution is tried again
_OTHERS = {*FEATURE_FILES, "silero_vad"}  # files of openWakeWord's that are no wake words
_VERSION = re.compile(r"_v\d[\d.]*$")


class WakeWord(NamedTuple):
    """A wake word's model. name: of the file, as openWakeWord and Home Assistant call it. window: embeddings."""

    name: str
    window: int
    model: Model

    @property
    def phrase(self) -> str:
        """The words that are spoken."""
        return _VERSION.sub("", self.name).replace("_", " ")


class WakeFiles(NamedTuple):
    """Model files that were read and look right."""

    melspectrogram: Model
    embedding: Model
    words: tuple[WakeWord, ...]


def read_models(words: Sequence[Path], features: Path | None = None) -> WakeFiles:
    """Read the files. A folder among them: all wake words in it, as long as it has one kind of file.

    `features`: folder of the two others; by default that of the first word. Raise DeviceFailed.
    """
    paths = [path for each in words for path in _files(each)]
    if len(kinds := {path.suffix for path in paths}) > 1:
        raise DeviceFailed(
            f"--wake-word: {' and '.join(sorted(kinds))} files are given; give .tflite files (on the device litert), "
            "or .onnx files (on onnxruntime)"
        )
    folder, kind = features or paths[0].parent, paths[0].suffix
    spectrum, embedding = (folder / (name + kind) for name in FEATURE_FILES)
    for path in (spectrum, embedding):
        if not path.is_file():
            raise DeviceFailed(
                f"--features {folder}: there is no {path.name}; "
                f"give the folder of openWakeWord's {spectrum.name} and {embedding.name}"
            )
    found = tuple(_word(path) for path in paths)
    names = [word.name for word in found]
    if again := {name for name in names if names.count(name) > 1}:
        raise DeviceFailed(f"--wake-word: {', '.join(sorted(again))} is given twice; rename one of the files")
    return WakeFiles(
        _feature(spectrum, (None, None), (None, 1, None, BINS)),
        _feature(embedding, (None, FRAMES, BINS, 1), (None, 1, 1, FEATURES)),
        found,
    )


def _files(path: Path) -> list[Path]:
    """Return the files of a path: itself, or the wake words in a folder."""
    if path.is_file():
        if path.suffix not in KINDS:
            raise DeviceFailed(f"--wake-word {path}: expected a {' or '.join(KINDS)} file, or a folder of them")
        return [path]
    if not path.exists():
        raise DeviceFailed(f"--wake-word {path}: no such file")
    found = sorted(each for each in path.iterdir() if each.suffix in KINDS and each.stem not in _OTHERS)
    if not found:
        raise DeviceFailed(f"--wake-word {path}: the folder has no wake word; give one with .tflite or .onnx files")
    return found


def _feature(path: Path, takes: Sequence[int | None], gives: Sequence[int | None]) -> Model:
    model = _read(path, "--features")
    _check(path, "--features", model, takes, gives=gives)
    return model


def _word(path: Path) -> WakeWord:
    model = _read(path, "--wake-word")
    shape = model.inputs[0].shape if len(model.inputs) == 1 else None
    window = shape[1] if shape is not None and len(shape) == 3 else None
    if window is None or not 1 <= window <= _FIRST:
        window = 16  # what is expected, for the message
    _check(path, "--wake-word", model, (1, window, FEATURES), gives=(1, 1))
    return WakeWord(path.stem, window, model)


def _read(path: Path, option: str) -> Model:
    try:
        return load(path, form="file", optional=False)
    except (ImportFailed, OSError) as error:
        raise DeviceFailed(f"{option} {path}: {error}") from error


def _check(path: Path, option: str, model: Model, takes: Sequence[int | None], gives: Sequence[int | None]) -> None:
    """Raise DeviceFailed unless the shapes fit. Sizes that the file leaves open do; the first execution checks them."""
    for kind, tensors, expected in (("input", model.inputs, takes), ("output", model.outputs, gives)):
        if len(tensors) != 1 or tensors[0].dtype != np.float32 or not _fits(tensors[0].shape, expected):
            wanted = ", ".join("?" if size is None else str(size) for size in expected)
            found = "; ".join(map(str, tensors))
            what = "no wake word's model" if option == "--wake-word" else "not openWakeWord's"
            raise DeviceFailed(
                f"{option} {path}: this is {what}: its {kind} is {found}, expected one of float32 [{wanted}]"
            )


def _fits(shape: Sequence[int | None] | None, expected: Sequence[int | None]) -> bool:
    if shape is None or len(shape) != len(expected):
        return shape is None
    return all(None in pair or pair[0] == pair[1] for pair in zip(shape, expected, strict=True))


class WakeModels:
    """The models on a device, served to all satellites of one event loop."""

    def __init__(self, files: WakeFiles, device: str, callers: int) -> None:
        """`callers`: how many satellites at most; none waits for a place in a queue. Use it in `async with`."""
        self._files, self._device, self._callers = files, device, callers
        self.words = {word.name: word for word in files.words}
        self.trouble = ""  #: why the latest execution failed; empty if it did not
        self._servers: dict[str, ModelServer] = {}
        self._stack = AsyncExitStack()
        self.first_features: Floats = np.empty((0, FEATURES), np.float32)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._serve("melspectrogram", self._files.melspectrogram, stack, (1, CONTEXT + STEP))
            await self._serve("embedding", self._files.embedding, stack, (1, FRAMES, BINS, 1))
            for word in self._files.words:
                await self._serve(word.name, word.model, stack, (1, word.window, FEATURES))
            self.first_features = await self._features_of_noise()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()

    async def _serve(self, name: str, model: Model, stack: AsyncExitStack, shape: tuple[int, ...]) -> None:
        compiled = await asyncio.to_thread(compile_model, model, device=self._device, progress=False)
        stack.callback(compiled.close)
        serving = compiled.serve(queue=self._callers, shapes=[shape], name=name)
        self._servers[name] = await stack.enter_async_context(serving)

    async def _features_of_noise(self) -> Floats:
        """Return features of noise: before a satellite has spoken, its past is noise, as in openWakeWord; here each
        time the same. Raise DeviceFailed if the two models give what openWakeWord's do not.
        """
        noise = np.random.RandomState(0).randint(-1000, 1000, _NOISE).astype(np.float32)
        frames = await self.frames(noise)
        if len(frames) != (expected := _NOISE // 160 - 3):
            raise DeviceFailed(
                f"--features: {FEATURE_FILES[0]} gives {len(frames)} frames of four seconds, expected {expected}"
            )
        windows = [frames[begin : begin + FRAMES] for begin in range(0, len(frames) - FRAMES + 1, 8)]
        return np.concatenate([await self.embedding(window) for window in windows])

    async def frames(self, samples: Floats) -> Floats:
        """Return the mel spectrum of some sound, [frames, 32], scaled as the embedding takes it. Raise BurstError."""
        found = await self._run("melspectrogram", samples[None])
        return found.reshape(-1, BINS) / np.float32(10) + np.float32(2)

    async def embedding(self, frames: Floats) -> Floats:
        """[1, 96] of 76 frames. Raise BurstError."""
        return (await self._run("embedding", frames[None, :, :, None])).reshape(1, FEATURES)

    async def activations(self, features: Floats, wanted: Iterable[str]) -> dict[str, float]:
        """Return how sure each wanted word is, from the latest embeddings. Raise BurstError."""
        names = list(wanted)
        windows = [features[-self.words[name].window :][None] for name in names]
        found = await asyncio.gather(*map(self._run, names, windows))
        return {name: float(each.reshape(-1)[0]) for name, each in zip(names, found, strict=True)}

    async def _run(self, name: str, array: Floats) -> Floats:
        """Execute, again where the device has died: nothing of a satellite is on it, so the result is the same."""
        for pause in (*_PAUSES, None):
            try:
                (found,) = await self._servers[name].run(np.ascontiguousarray(array), timeout=_WITHIN)
            except BurstError as error:
                self.trouble = f"{name}: {error}"
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                self.trouble = ""
                return np.array(found, np.float32)
        raise AssertionError  # the last pass has returned, or raised

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each model, as `ModelServer.stats` has them."""
        return [server.stats() for server in self._servers.values()]


__all__ = ["STEP", "WakeFiles", "WakeModels", "WakeWord", "read_models"]
