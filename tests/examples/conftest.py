"""`protocol_page` lies beside this file, for two of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
