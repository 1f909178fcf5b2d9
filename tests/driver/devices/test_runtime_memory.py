"""What ONNX Runtime takes for a request by itself, of a size that an input's value says, ends its engine alone."""

import numpy as np
import pytest
from onnx import helper
from onnx_files import file_model, written

import driver
from burst import ResourceExhaustedPersistent


@pytest.mark.integration
def test_a_size_by_value(place, process, monkeypatch, tmp_path):
    """A request of 8 bytes asks for 16 GiB between two operations: its client is told so, and the next one succeeds."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/burst/limits.toml"
    path.parent.mkdir(parents=True)
    path.write_text("client_bytes = 67108864\nengine_bytes = 268435456\n")
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["all"], value=helper.make_tensor("one", 1, [1], [1.0])),
        helper.make_node("ReduceSum", ["all"], ["sum"], keepdims=0),
    ]
    model = file_model(written(nodes, [("size", "int64", [1])], [("sum", "float32", [])]))
    with driver.connect("onnxruntime") as device, device.prepare(model) as prepared:
        engine = process(device.engine_pid)
        assert prepared.run(np.array([1000], np.int64))[0] == 1000
        with pytest.raises(ResourceExhaustedPersistent, match="was ended: 335544320 are allowed"):
            prepared.run(np.array([2**32], np.int64))
        assert engine.has_ended()
        assert prepared.run(np.array([1000], np.int64))[0] == 1000
