"""Prints the folder for GST_PLUGIN_PATH: `export GST_PLUGIN_PATH=$(python -m driver.gateways.gstreamer)`."""

from __future__ import annotations

import sys

from driver.gateways.gstreamer.plugin_folder import FOLDER

if __name__ == "__main__":
    sys.stdout.write(f"{FOLDER}\n")
