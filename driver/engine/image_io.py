"""What happens before and after each run: images are gathered and scattered, and shared pools synchronised."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import HardwareBuffer, InvalidArgument, Memory
from burst.memory_limits import check_available
from driver.nn import combine_dimensions
from driver.nn.arena import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from burst import Request, RequestArgument
    from driver.nn import Operand

    Array = NDArray[Any]


class PoolAccess:
    """The pools of one bound request. `copied_bytes`: what each run copies, because an image has gaps between rows."""

    def __init__(self) -> None:
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._synced: dict[Memory, bool] = {}  # whether the run writes to it
        self._shapes: dict[int, tuple[int, ...]] = {}  # of outputs that are images
        self.copied_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._before or self._after or self._synced)

    def uses(self, pool: object, *, writes: bool) -> None:
        """Notes that the request reads or writes this pool."""
        if isinstance(pool, Memory) and pool.needs_sync:
            self._synced[pool] = writes or self._synced.get(pool, False)

    def input(self, where: str, argument: RequestArgument, operand: Operand, image: HardwareBuffer) -> Array:
        """The image as an input array. Raises InvalidArgument."""
        dimensions = _dimensions(where, argument, operand, image)
        found = image.view()
        if found is None:
            found = _staging(image)
            self._before.append(partial(image.gather, found))
            self.copied_bytes += found.nbytes
        return found.reshape(dimensions)

    def output(self, n: int, argument: RequestArgument, operand: Operand, image: HardwareBuffer) -> Array:
        """The memory for output `n`, which is this image. Raises InvalidArgument."""
        self._shapes[n] = _dimensions(f"output {n}", argument, operand, image)
        found = image.view()
        if found is None:
            found = _staging(image)
            self._after.append(partial(image.scatter, found))
            self.copied_bytes += found.nbytes
        return found.reshape(-1).view(np.uint8)

    def with_image_shapes(self, request: Request) -> Request:
        """The request, with the image's shape for each output that is an image."""
        if not self._shapes:
            return request
        outputs = enumerate(request.outputs)
        return request._replace(
            outputs=tuple(a._replace(dimensions=self._shapes.get(n, a.dimensions)) for n, a in outputs)
        )

    def wrap(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` with all this before and after it; `run` itself if there is nothing to do."""
        return partial(self._run, run) if self else run

    def _run(self, run: Callable[[], object]) -> None:
        synced = list(self._synced.items())
        for pool, writes in synced:
            pool.begin(writes=writes)
        try:
            for copy in self._before:
                copy()
            run()
            for copy in self._after:
                copy()
        finally:
            for pool, writes in synced:
                pool.end(writes=writes)


def _staging(image: HardwareBuffer) -> Array:
    """Memory without gaps for a copy of the image. Raises ResourceExhaustedPersistent."""
    nbytes = math.prod(image.shape) * image.dtype.itemsize
    check_available(nbytes)
    return memory(nbytes).view(image.dtype).reshape(image.shape)


def _dimensions(where: str, argument: RequestArgument, operand: Operand, image: HardwareBuffer) -> tuple[int, ...]:
    """The operand's dimensions, if the image fits: its own, with more or fewer axes of length 1."""
    if argument.offset or argument.length:
        raise InvalidArgument(
            f"{where}: {argument.length} bytes at offset {argument.offset} of an image; images are used whole: give "
            "offset 0 and length 0"
        )
    if operand.type.is_scalar or operand.type.dtype != image.dtype:
        raise InvalidArgument(
            f"{where}: the operand is {operand.type.name}, but an image in {image.format} has {image.dtype}"
        )
    wanted = combine_dimensions(operand.dimensions, argument.dimensions)
    if wanted is not None and wanted and 0 not in wanted and _long(wanted) == _long(image.shape):
        return wanted
    found = None if wanted is None else combine_dimensions(wanted, image.shape)
    if found is None:
        raise InvalidArgument(
            f"{where}: dimensions {list(argument.dimensions or operand.dimensions)} do not fit: an image in "
            f"{image.format} of "
            f"{image.width} x {image.height} has dimensions {list(image.shape)}"
        )
    return found


def _long(dimensions: tuple[int, ...]) -> list[int]:
    return [d for d in dimensions if d != 1]
