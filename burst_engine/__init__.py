"""burst_engine has the one name that no other project has: it says what stands in the place of fmq, burst or driver.

`from burst_engine import driver` is `import driver`, or an ImportError that names what would have come instead.
"""

from importlib import import_module
from types import ModuleType

from burst_engine import clone  # noqa: F401 (it looks at what the next lines need)

# isort: split
from burst_engine.clone import use_installed
from burst_engine.names import BEGINNINGS, Namesake, expect, namesakes

__all__ = ["Namesake", "expect", "namesakes", "use_installed"]


def __getattr__(name: str) -> ModuleType:
    """Return one of the packages. Raise ImportError if something else would be imported under its name."""
    if name not in BEGINNINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    expect(name)
    return import_module(name)
