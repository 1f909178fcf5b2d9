"""The command in this process, and small model files for it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from driver.cli.command import burst

IMPORTED = Path(__file__).parents[1] / "importers"


@pytest.fixture
def command(shared, monkeypatch):
    """Runs `burst …` with devices that other tests use, too; asserts how it ends, and that nobody sees a traceback."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(shared.path))

    def call(*words, ends=0):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(burst, [str(word) for word in words])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == ends, result.output
        return SimpleNamespace(out=result.stdout, err=result.stderr, json=lambda: json.loads(result.stdout))

    return call


@pytest.fixture(scope="session")
def files():
    """Paths of model files: images in bytes and in floats (channels last and first), batches, two
    inputs, what litert does not take, states.
    """
    return SimpleNamespace(
        bytes=IMPORTED / "vendor/mobilenet_uint8.tflite",
        floats=IMPORTED / "vendor/mobilenet_float32.tflite",
        first=IMPORTED / "onnx_models/mobilenet.onnx",
        open=IMPORTED / "vendor/batches_float32.tflite",
        two=IMPORTED / "vendor/condition_float32.tflite",
        unplaced=IMPORTED / "vendor/detector_float32.tflite",
        states=IMPORTED / "vendor/lstm_float32.tflite",
    )
