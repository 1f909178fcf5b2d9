"""The network of the audio demo in this process, its state handed on by hand: what buffers have to do as well."""

import numpy as np

from driver.demos.keypad import BLOCK
from driver.demos.listener import CLASSES, STATES, WEIGHTS, build_model
from driver.nn import Interpreter


def by_hand(blocks, weights=WEIGHTS):
    """The answers of the interpreter in this process, and both states after the last block."""
    block, *states = [np.zeros(shape, np.float32) for shape in ((1, BLOCK), *STATES)]
    answer, *after = [np.empty(shape, np.float32) for shape in ((1, CLASSES), *STATES)]
    raw = [array.reshape(-1).view(np.uint8) for array in (answer, *after)]
    network, answers = Interpreter(build_model(weights)).bind([block, *states], raw), []
    for one in blocks:
        block[...] = one
        network.run()
        answers.append(answer[0].copy())
        for state, new in zip(states, after, strict=True):
            state[...] = new
    return np.array(answers), states
