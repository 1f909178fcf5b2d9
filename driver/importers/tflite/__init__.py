"""LiteRT model files (.tflite)."""

from .reader import load, read

__all__ = ["load", "read"]
