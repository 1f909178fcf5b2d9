"""The table of all lowerings, family by family."""

from collections.abc import Callable

from . import control, elementwise, movement, recurrent, reduce, window
from .node import OrtNode

LOWERINGS: dict[str, Callable[[OrtNode], None]] = {
    **control.TABLE,
    **elementwise.TABLE,
    **movement.TABLE,
    **recurrent.TABLE,
    **reduce.TABLE,
    **window.TABLE,
}
