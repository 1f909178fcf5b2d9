"""Model files for the test device that does what its files say."""

import numpy as np

from driver.nn import Operand
from driver.nn.file_form import ModelFile, model_of_file, tensor_type

FILER = "burst_test_devices.filer:Filer"
X, ONE = np.zeros(4, np.float32), np.ones(4, np.float32)


def file_model(words):
    """The model that is a file of these words."""
    side = [Operand(tensor_type("float32", 1), (4,))]
    return model_of_file(ModelFile("onnx", np.frombuffer(words.encode(), np.uint8)), side, side)
