"""LiteRT model files (.tflite): `reader` makes operations of them, `header` reads their inputs and outputs."""
