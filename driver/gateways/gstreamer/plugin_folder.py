"""Where GStreamer finds the element."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""An entry of GST_PLUGIN_PATH: the loader of Python's elements looks into the folder `python` of each."""

ELEMENT = "burstinfer"
