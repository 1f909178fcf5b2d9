"""operations/random_graph: random models on which a device must agree with the reference."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from burst import StatusError
from driver.nn import OPERATIONS
from driver.vts.graphs import reference, smallest_difference
from driver.vts.image_makers import IMAGE_MAKERS
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.makers import MAKERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.vts.graphs import RandomGraph
    from driver.vts.sketch import Array
    from driver.vts.target import Target


def tests(mixed: int, each: int) -> Iterator[Test]:
    """mixed: how many graphs of all operations together; alone: how many of each one alone."""
    yield Test("operations/random_graph/mixed", partial(agree, None, mixed))
    for name in sorted((MAKERS | IMAGE_MAKERS).keys() & OPERATIONS.keys()) if each else ():
        yield Test(f"operations/random_graph/{name.lower()}", partial(agree, [name], each))


def agree(operations: Sequence[str] | None, examples: int, target: Target) -> None:
    """The device agrees with the reference within the HAL's tolerances for random graphs."""
    if find_spec("hypothesis") is None:
        skip("random graphs need hypothesis: pip install 'burst-engine[vts]'")
    found = smallest_difference(partial(_run, target), operations=operations, examples=examples)
    check(found is None, f"{found[1]}, in this graph:\n{found[0]!r}" if found else "")


def _run(target: Target, graph: RandomGraph) -> Sequence[Array]:
    """Outputs of the device; the reference's own where the device does not support an operation."""
    try:
        if not all(target.supported(graph.model)):
            return reference(graph)
        with target.prepared(graph.model) as model:
            return model.run(*graph.feeds, timeout=target.patience)
    except StatusError as error:
        raise Failed(f"the device answered {error.status.name}: {error}, to this graph:\n{graph!r}") from error
