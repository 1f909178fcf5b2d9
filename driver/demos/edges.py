"""The model file that comes with Burst, for first programs."""

from pathlib import Path

EDGES = Path(__file__).with_name("edges.onnx")
"""Finds edges: "image" is float32 1 x 3 x 64 x 64, "edges" 1 x 1 x 62 x 62. examples/edge_model.py has made it."""
