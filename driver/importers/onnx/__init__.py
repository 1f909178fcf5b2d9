"""ONNX model files (.onnx)."""

from .reader import load, read

__all__ = ["load", "read"]
