"""`by_hand` lies beside this file, for two of the tests; what trains the networks is in a folder that is no package."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "examples")]
