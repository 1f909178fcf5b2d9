"""The table of all lowerings, family by family."""

from collections.abc import Callable

from . import elementwise, movement, recurrent, reduce, window
from .node import Node

LOWERINGS: dict[str, Callable[[Node], None]] = {
    **elementwise.TABLE,
    **movement.TABLE,
    **recurrent.TABLE,
    **reduce.TABLE,
    **window.TABLE,
}
