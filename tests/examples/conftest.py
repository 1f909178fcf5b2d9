"""The examples are programs in a folder, not a package: put the folder where they look for each other. `protocol_page`
and `by_hand` lie beside this file, each for two of the tests.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
