"""burst_engine has the one name that no other project has: it says what stands in the place of fmq, burst or driver."""

from burst_engine import clone  # noqa: F401 (it looks at what the next lines need)

# isort: split
from burst_engine.clone import use_installed
from burst_engine.names import Namesake, expect, namesakes

__all__ = ["Namesake", "expect", "namesakes", "use_installed"]
