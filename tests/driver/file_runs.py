"""Runs of model files on a device in this process."""

import numpy as np

from driver.interface import BindOptions, Preparation


def prepared(device, model):
    return device.prepare(model, Preparation())


def bound(model, feeds, room=4096):
    """An execution, and the memory of its outputs."""
    outputs = [np.full(room, 0xA5, np.uint8) for _ in model.outputs]
    return model.bind(feeds, outputs, BindOptions()), outputs


def computed(model, feeds):
    """The shapes and bytes of the outputs of one run."""
    execution, outputs = bound(model, feeds)
    execution.run()
    sizes = [port.nbytes(shape) for port, (shape, _) in zip(model.outputs, execution.shapes, strict=True)]
    return [(shape, raw[:n].tobytes()) for (shape, _), raw, n in zip(execution.shapes, outputs, sizes, strict=True)]
