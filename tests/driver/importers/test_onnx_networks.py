"""Networks as torch exports them and onnxruntime quantises them: the same results, here and on LiteRT.

The files are made by make_onnx.py.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.nn import OperandType

runtime = pytest.importorskip("onnxruntime", reason="no onnxruntime to compare with")
FOLDER = Path(__file__).parent / "onnx_models"
NETWORKS = sorted(path.stem for path in FOLDER.glob("*.onnx"))


def tried(path):
    """The model, an input for it and onnxruntime's result."""
    model = driver.load(path, form="operations")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    # Without VNNI, its int8 kernels add products of two bytes in 16 bits, which saturate. This session's do not.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    random, info = np.random.default_rng(7), session.get_inputs()[0]
    if info.type == "tensor(int64)":
        feed = random.integers(0, 64, info.shape)
    else:
        feed = random.standard_normal(info.shape).astype(np.float32)
    return model, feed, session.run(None, {info.name: feed})[0]


def agrees(model, result, other):
    """Up to rounding: of floats, or two units where the result was quantised."""
    is_quantised = any(operation.type == "QUANTIZE" for operation in model.main.operations)
    assert result.shape == other.shape
    np.testing.assert_allclose(result, other, rtol=1e-4, atol=2 * _step(model) if is_quantised else 2e-5)
    assert np.ptp(other) > 0.05


def _step(model):
    """The scale of the value from which the result was taken."""
    last = model.main.operations[-1]
    assert last.type == "DEQUANTIZE"
    return model.main.operands[last.inputs[0]].scale


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_on_the_reference(run, name):
    """Its result is that of onnxruntime."""
    model, feed, other = tried(FOLDER / f"{name}.onnx")
    agrees(model, run(model, [feed])[0], other)


@pytest.mark.integration
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_on_litert(name):
    """The same with LiteRT, which takes every operation of each."""
    pytest.importorskip("ai_edge_litert", reason="no ai-edge-litert")
    model, feed, other = tried(FOLDER / f"{name}.onnx")
    dtype = model.main.operands[model.main.inputs[0]].type.dtype
    with driver.connect("litert") as device:
        supported = device.supported_operations(model)
    assert all(supported)
    with driver.compile(model, devices=["litert"]) as prepared:
        agrees(model, prepared.run(feed.astype(dtype))[0], other)
        assert {place for place, _ in prepared.placement()} == {"litert"}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.endswith("int8")])
def test_a_quantised_network_computes_on_integers(name):
    """Floats are left at its ends, and where a mean gets another scale: no convolution reads any."""
    graph = driver.load(FOLDER / f"{name}.onnx", form="operations").main
    sums = [o for o in graph.operations if o.type in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD")]
    kinds = {graph.operands[o.inputs[0]].type for o in sums}
    assert kinds == {OperandType.TENSOR_QUANT8_ASYMM if "uint8" in name else OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
    filters = {graph.operands[o.inputs[1]].type for o in sums if o.type != "ADD"}
    assert (OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL in filters) == ("uint8" not in name)
    assert sum(o.type in ("QUANTIZE", "DEQUANTIZE") for o in graph.operations) <= 4


@pytest.mark.parametrize("name", ["mobilenet", "resnet"])
def test_an_image_network_is_transposed_once(name):
    """Where the image comes in; from there on its channels are last."""
    counts = Counter(o.type for o in driver.load(FOLDER / f"{name}.onnx", form="operations").main.operations)
    assert counts["TRANSPOSE"] == 1
    assert counts["RELU"] == counts["RELU6"] == 0


def test_the_files_are_small():
    """At most 300 kB each, and 1.2 MB together."""
    sizes = [path.stat().st_size for path in FOLDER.glob("*.onnx")]
    assert max(sizes) <= 300_000
    assert sum(sizes) <= 1_200_000


@pytest.mark.stress
def test_networks_of_usual_size(run, tmp_path):
    """MobileNetV2 at 224 x 224, ResNet-18, an encoder of four layers and the audio nets, made and quantised afresh."""
    pytest.importorskip("torch", reason="no torch to export with")
    made = subprocess.run(
        [sys.executable, Path(__file__).parent / "make_onnx.py", "--full", "--folder", tmp_path],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for path in sorted(tmp_path.glob("*.onnx")):
        model, feed, other = tried(path)
        result = run(model, [feed])[0]
        print(path.stem, np.abs(result - other).max(), np.ptp(other))
        if "int8" in path.stem:
            assert np.abs(result - other).max() <= 0.05 * np.ptp(other)
        else:
            np.testing.assert_allclose(result, other, rtol=1e-3, atol=1e-4)
