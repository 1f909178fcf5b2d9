"""Programs that nobody changes: what they import as `onnxruntime` or a LiteRT interpreter runs models in a device."""
