"""The examples are programs in a folder, not a package: put the folder where they look for each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
