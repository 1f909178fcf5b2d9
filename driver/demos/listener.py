"""A small recurrent network that hears keys in 20 ms blocks of sound, and the classic detector to compare it with.

The block goes in as it is: 320 samples as float32. A bank of 32 pairs of filters that training has found measures the
power in as many bands; its logarithms enter an LSTM, which has seen all the sound before. What it remembers, its output
state and its cell state, are inputs and outputs of the model: the caller hands them from call to call. The answer
is how likely it is for each key, and for none, that it was held during the block *before* this one.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

import driver
from driver.demos.keypad import BLOCK, COLUMNS, KEYS, NOTHING, RATE, ROWS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

WEIGHTS = files("driver.demos") / "audio_net.npz"
BANDS, CELLS, CLASSES = 32, 64, 1 + len(KEYS)
STATES = ((1, CELLS), (1, CELLS))  # float32: inputs 1 and 2, outputs 1 and 2
DELAY = 1  # blocks by which an answer comes late
FAINT = 1e-6  # a power that makes no difference

NONE, TANH = 0, 4  # activations, as the HAL numbers them
_GATES = ("input", "forget", "cell", "output")


def build_model(weights: Traversable = WEIGHTS) -> driver.Model:
    """Spell the network out for a driver: (block, output state, cell state) to (answer, both states)."""
    with weights.open("rb") as opened, np.load(opened) as file:
        w = {name: file[name] for name in file.files if "." in name}
    m = driver.ModelBuilder()
    block = m.input("float32", (1, BLOCK))
    states = [m.input("float32", shape) for shape in STATES]
    parts, nothing = (w["bank.cos"], w["bank.sin"]), np.zeros(BANDS, np.float32)
    halves = [m.operation("FULLY_CONNECTED", block, part, nothing, NONE) for part in parts]
    squares = [m.operation("MUL", half, half, NONE) for half in halves]
    power = m.operation("ADD", m.operation("ADD", *squares, NONE), np.array([FAINT], np.float32), NONE)
    into, again, bias = ([w[f"{part}.{gate}"] for gate in _GATES] for part in ("into", "again", "bias"))
    left_out = None, None, None, *bias, None, None  # peepholes before the biases, a projection after them
    _, *after, heard = m.operation("LSTM", m.operation("LOG", power), *into, *again, *left_out, *states, TANH, 0.0, 0.0)
    scores = m.operation("FULLY_CONNECTED", heard, w["keys.filter"], w["keys.bias"], NONE)
    m.output(m.operation("SOFTMAX", scores, 1.0), *after)
    return m.build()


class Goertzel:
    """The detector of telephone exchanges: the powers of the eight tones in a block, and rules for when they are a key.

    `share`: of the block's power that the two strongest must have. `lead`: how many times stronger than the next tone
    of the same group each must be. Training chooses both.
    """

    def __init__(self, share: float, lead: float) -> None:
        self.share, self.lead = share, lead
        time = np.arange(BLOCK)[:, None] / RATE
        self._waves = np.exp(2j * np.pi * time * np.array(ROWS + COLUMNS)).astype(np.complex64)

    @classmethod
    def trained(cls, weights: Traversable = WEIGHTS) -> Goertzel:
        """Return it with what training chose."""
        with weights.open("rb") as opened, np.load(opened) as file:
            return cls(*file["goertzel"].tolist())

    def label(self, block: np.ndarray) -> int:
        """Return its label of one block."""
        return int(self.labels(block[None])[0])

    def labels(self, blocks: np.ndarray) -> np.ndarray:
        """Return its label of each of many blocks [N, 320]."""
        powers = np.abs(blocks @ self._waves).reshape(-1, 2, 4) ** 2 * (2 / BLOCK)
        order, ranked = powers.argmax(axis=2), np.sort(powers, axis=2)
        loud = ranked[:, :, 3].sum(axis=1) > self.share * np.square(blocks).sum(axis=1) + FAINT
        clear = (ranked[:, :, 3] > self.lead * ranked[:, :, 2]).all(axis=1)
        return np.where(loud & clear, 1 + 4 * order[:, 0] + order[:, 1], NOTHING)
