"""Readers of the bytes of model files, which trust nothing: importers and devices share them, and need no package.

protobuf.py, flatbuffer.py     the two encodings
onnx_schema.py, tflite_schema.py     the numbers of fields and element types
"""
