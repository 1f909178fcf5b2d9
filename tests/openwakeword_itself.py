"""openWakeWord's own code, on an interpreter that a test gives it."""

import sys

import numpy as np
import pytest
from needed_tools import give_up


def their_model(patched, module, models, words, kind=".tflite"):
    """Its model for these files of wake words. `patched`: a MonkeyPatch; `module`: what it takes for tflite-runtime."""
    if sys.version_info >= (3, 12):
        pytest.skip("openwakeword needs tflite-runtime, which has no wheel for this Python")
    # tflite-runtime has not been released since 2023; LiteRT is what it is called now, with the same interpreter.
    patched.setitem(sys.modules, "tflite_runtime", module)
    patched.setitem(sys.modules, "tflite_runtime.interpreter", module)
    patched.setattr(module, "interpreter", module, raising=False)
    try:
        from openwakeword.model import Model
    except ModuleNotFoundError as error:
        give_up(f"{error.name} is missing: pip install openwakeword")
    np.random.seed(0)  # of the noise before the first sound
    return Model(
        wakeword_models=[str(path) for path in words],
        inference_framework=kind[1:],
        melspec_model_path=str(models / f"melspectrogram{kind}"),
        embedding_model_path=str(models / f"embedding_model{kind}"),
    )
