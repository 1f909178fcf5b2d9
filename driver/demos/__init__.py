"""The two demos: `camera` and `audio` show the API, to be copied as a start; the rest is what they look at and leave.

They need the extra `demo`, import nothing of these packages but what is public, and `burst demo` runs them. Beside
them lies a model file of 1 kB for first programs, which needs no extra.
"""

from pathlib import Path

__all__ = ["EDGES"]

EDGES = Path(__file__).with_name("edges.onnx")
"""Finds edges: "image" is float32 1 x 3 x 64 x 64, "edges" 1 x 1 x 62 x 62. examples/edge_model.py has made it."""
