"""ONNX model files (.onnx): `reader` makes operations of them, `header` reads their inputs and outputs."""
