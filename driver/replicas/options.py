"""How a model is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from driver.options import MOST_DEPTH, check_open_batch, is_integer

if TYPE_CHECKING:
    from driver.nn import Model
    from driver.options import InputShapes

_MOST_REPLICAS, _MOST_QUEUE, _MOST_BATCH, _LONGEST_WINDOW = 64, 2**20, 2**16, 60.0


class ServeOptions(NamedTuple):
    """The options of `CompiledModel.serve`, which explains them."""

    replicas: int = 2
    queue: int = 64
    batch: int = 1
    batch_window: float = 0.002
    depth: int = 2
    warm_up: bool = True
    recover: bool = True
    shapes: InputShapes | None = None
    name: str = ""

    def checked(self, model: Model) -> ServeOptions:
        """Return these options; raise ValueError, or TypeError for what is no number, naming what is wrong."""
        for name, most in (
            ("replicas", _MOST_REPLICAS),
            ("queue", _MOST_QUEUE),
            ("batch", _MOST_BATCH),
            ("depth", MOST_DEPTH),
        ):
            given = getattr(self, name)
            if not (is_integer(given) and 1 <= given <= most):
                raise ValueError(f"{name}={given!r:.40}: an integer from 1 to {most}")
        if not 0 <= self.batch_window <= _LONGEST_WINDOW:
            raise ValueError(f"batch_window={self.batch_window!r}: seconds from 0 to {_LONGEST_WINDOW:g}")
        if self.batch > 1:
            check_open_batch(model, self.batch)
        return self
