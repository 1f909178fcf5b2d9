"""Do real model files give the bits of their own runtime, from every start and on every way?

    python bench/same_bits.py FOLDER...

Every .onnx and .tflite file below the folders runs in its own runtime in this process, on one thread, and on the device
with that runtime: compiled anew and from the cache, by `run` and in a burst, and as `driver.load` and `driver.compile`
place it by themselves; on the same random inputs, of the first open sizes that the runtime takes. Files that keep a
state are compared run by run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus import DEVICES, VALUES, shapes_for

import driver
from driver.cli.own_runtime import own_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]
    Shapes = dict[str, tuple[int, ...]]

SIZES = 64, 32, 256, 512, 16, 8, 4
"""Of what a file leaves open beside its first dimension; then those that `corpus.py` gives."""


def shapes_with(model: driver.Model, size: int) -> Shapes:
    """A shape for each input."""
    return {
        tensor.name: tuple(own or (size if axis else 1) for axis, own in enumerate(tensor.shape or ()))
        for tensor in model.inputs
    }


def random_inputs(model: driver.Model, shapes: Shapes) -> Arrays:
    """Noise of each input's type; integers are 0 or 1, which even types of tokens are."""
    random, found = np.random.default_rng(7), {}
    for tensor in model.inputs:
        shape = shapes[tensor.name]
        if tensor.name in VALUES:
            found[tensor.name] = np.full(shape, VALUES[tensor.name], tensor.dtype)
        else:
            drawn = random.random(shape) if tensor.dtype.kind == "f" else random.integers(0, 2, shape)
            found[tensor.name] = np.asarray(drawn, tensor.dtype)
    return found


def own_outputs(path: Path, model: driver.Model) -> tuple[Arrays, list[Sequence[Any]]]:
    """Inputs, and what the runtime gives in its second run and in the two after it. Raises what it raised last."""
    error: Exception | None = None
    for shapes in (*(shapes_with(model, size) for size in SIZES), shapes_for(path, model)):
        inputs = random_inputs(model, shapes)
        try:
            own = own_runtime(path, [*inputs.values()])
        except Exception as raised:  # noqa: BLE001 (a runtime may raise anything for a size)
            error = raised
            continue
        if own is None:
            raise LookupError("its own runtime is not installed")
        return inputs, [own.call() for _ in range(3)]
    raise error or LookupError("it has no inputs")


def faults(path: Path) -> list[str]:
    """The ways on which a file gives other bits."""
    model = driver.load(path, form="file", optional=False)
    inputs, wanted = own_outputs(path, model)
    found: list[str] = []

    def compare(way: str, run: Callable[[Arrays], Sequence[Any]], number: int) -> None:
        pairs = zip(run(inputs), wanted[number], strict=True)
        if not all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs):
            found.append(way)

    with TemporaryDirectory() as cache:
        for start in ("first start", "cached start"):
            with driver.compile(model, [DEVICES[path.suffix]], cache_dir=cache) as compiled:
                compiled.run(inputs)
                compare(f"run, {start}", compiled.run, 0)
                with compiled.burst(input_shapes={name: array.shape for name, array in inputs.items()}) as burst:
                    for number in (1, 2):
                        compare(f"burst, {start}", lambda its, burst=burst: burst.run(its).outputs, number)
    with driver.compile(driver.load(path, optional=False)) as compiled:
        compiled.run(inputs)
        compare("run, placed by itself", compiled.run, 0)
    return found


def main() -> None:
    """Prints a line for each file that differs, and how many do not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    files = [p for folder in parser.parse_args().folders for p in sorted(folder.rglob("*")) if p.suffix in DEVICES]
    right = 0
    for path in files:
        try:
            told = ", ".join(faults(path))
        except Exception as error:  # noqa: BLE001 (it is what the line says)
            told = f"{type(error).__name__}: {error}"
        right += not told
        if told:
            print(f"{path.parent.name}/{path.name}: {told}", flush=True)
    print(f"{right} of {len(files)} files: the bits of their own runtime")
    sys.exit(right < len(files))


if __name__ == "__main__":
    main()
