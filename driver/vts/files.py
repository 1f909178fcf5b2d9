"""extension/file: what every device does that knows the extension "burst.file": it runs model files as they are.

The files are small and made in code (`driver.vts.file_models`): .onnx and .tflite, and by JAX and PyTorch, where these
are installed, .jax and .pt2. Each row is there for all kinds; a device that does not run a kind says so, and skips its
others.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from burst import ErrorStatus, Memory, StatusError
from driver.nn import Model, Operand, Operation, Subgraph
from driver.nn.file_form import NAME
from driver.vts.bench import ArgumentPlace, answer, output_sizes, request
from driver.vts.cases import Case
from driver.vts.file_models import Network, NetworkPort, NetworkStep, onnx_file
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.operations import check_short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.bench import Array
    from driver.vts.target import Target

_SHAPES = {"scalar": (), "vector": (5,), "five_axes": (1, 2, 1, 3, 2), "empty": (2, 0)}
_TYPES = {
    "onnx": ("float32", "float64", "float16", "int32", "int64", "bool"),
    "tflite": ("float32", "int32", "int64", "bool"),
    "jax": ("float32", "float64", "float16", "int32", "int64", "bool"),
    "pt2": ("float32", "float64", "float16", "int32", "int64", "bool"),
}
_MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
_OUTSIDE = ("../w.bin", "/etc/hostname", "a/../../w.bin", "*/_ORT_MEM_ADDR_/*")
_UNSTOPPABLE = {"jax", "pt2"}
_CLIENTS, _RUNS = 4, 8
_SIDE, _PRODUCTS = 512, 400  # of a run that takes seconds
_SOON, _LATE = 0.05, 1.0  # seconds


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope."""
    rows: dict[str, Callable[[str, Target], object]] = {
        "known": known,
        "order": order,
        "names": names,
        "open_sizes": open_sizes,
        "short_output": short_output,
        "pools": pools,
        "concurrent": concurrent,
        "damaged": damaged,
        "another_type": another_type,
        "not_alone": not_alone,
        "deadline": deadline,
        "client_gone": client_gone,
    }
    for kind, dtypes in _TYPES.items():
        for dtype in dtypes:
            yield Test(f"extension/file/{kind}/{dtype}", partial(typed, kind, dtype))
        for name, row in rows.items():
            yield Test(f"extension/file/{kind}/{name}", partial(row, kind))
    yield Test("extension/file/onnx/weights_beside", weights_beside)
    for n, place in enumerate(("w.bin", *_OUTSIDE)):
        yield Test(f"extension/file/onnx/weights_missing/{n}", partial(weights_missing, place))


def _negation(dtype: str, shape: tuple[int | None, ...]) -> Network:
    step = NetworkStep("NOT" if dtype == "bool" else "NEG", ("x",), "y")
    return Network((NetworkPort("x", dtype, shape),), (NetworkPort("y", dtype, shape),), (step,))


def _difference(first: str = "a", second: str = "b") -> Network:
    """Return a network of two outputs: a - b and b - a."""
    inputs, outputs = ([NetworkPort(name, "float32", (3,)) for name in side] for side in ((first, second), ("y", "z")))
    steps = NetworkStep("SUB", (first, second), "y"), NetworkStep("SUB", (second, first), "z")
    return Network(tuple(inputs), tuple(outputs), steps)


def _long() -> Network:
    """Return a network that takes seconds without a loop: one product of matrices after the other."""
    names_ = ["x", *(f"t{n}" for n in range(_PRODUCTS - 1)), "y"]
    steps = tuple(NetworkStep("PRODUCT", (before, "x"), after) for before, after in pairwise(names_))
    x, y = (NetworkPort(name, "float32", (_SIDE, _SIDE)) for name in "xy")
    return Network((x,), (y,), steps)


def _numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    whole = np.random.default_rng(seed).integers(-9, 9, shape)
    return np.asarray(whole % 2 if dtype == "bool" else whole, dtype)


def _require(kind: str, target: Target) -> None:
    """Skip the test where the device does not run files of this kind."""
    if NAME not in target.device.extensions:
        skip(f"the device does not know the extension {NAME}")
    network, other = _negation("float32", (5,)), f"a .{kind} file, which needs"
    (reason,) = target.device.explain(network.model(kind, b"-"))  # frameworks take a while to write a file
    if (reason and other in reason) or target.device.explain(network.model(kind)) != [None]:
        skip(f"the device runs no .{kind} files")


def _same(network: Network, feeds: Sequence[Array], found: Sequence[Array], what: str) -> None:
    for number, (array, wanted) in enumerate(zip(found, network.run(feeds), strict=True)):
        check(array.shape == wanted.shape, f"{what}: output {number} has the shape {array.shape}, not {wanted.shape}")
        is_same = array.dtype == wanted.dtype and np.array_equal(array, wanted)
        check(is_same, f"{what}: output {number} is {array!r:.200}, and should be {wanted!r:.200}")


def _refusal(model: Model, target: Target) -> str:
    """Return what the device says when it refuses to prepare; fail the test if it does not."""
    try:
        with target.prepared(model):
            pass
    except StatusError as error:
        return str(error)
    raise Failed("the device prepares it")


def known(kind: str, target: Target) -> None:
    """A kind that the device does not run is refused with a reason, by `explain` and when it is prepared."""
    if NAME not in target.device.extensions:
        skip(f"the device does not know the extension {NAME}")
    model = _negation("float32", (5,)).model(kind)
    (reason,) = target.device.explain(model)
    check(target.supported(model) == [reason is None], "`supported_operations` and `explain` contradict each other")
    if reason is not None:
        check(len(reason.split()) > 2, f"the reason against a .{kind} file says nothing: {reason!r}")
        _refusal(model, target)


def typed(kind: str, dtype: str, target: Target) -> None:
    """Scalars, vectors, tensors of five axes and empty ones give right results, on the plain path and in a burst."""
    _require(kind, target)
    for name, shape in _SHAPES.items():
        network, x = _negation(dtype, shape), _numbers(dtype, shape)
        (reason,) = target.device.explain(network.model(kind))
        if reason is not None:
            skip(f"{dtype}: {reason}")
        if kind == "tflite" and name == "empty":
            continue  # TFLite has no such tensors
        with target.prepared(network.model(kind)) as model, model.burst() as burst:
            _same(network, [x], model.run(x, timeout=target.patience), f"{name} of {dtype}")
            _same(network, [x], burst.run(x, timeout=target.patience).outputs, f"{name} of {dtype} in a burst")


def order(kind: str, target: Target) -> None:
    """Inputs and outputs have the order of the file, whatever their names sort like."""
    _require(kind, target)
    feeds = [_numbers("float32", (3,), seed) for seed in (1, 2)]
    for pair in (("a", "b"), ("b", "a")):
        network = _difference(*pair)
        with target.prepared(network.model(kind)) as model:
            _same(network, feeds, model.run(*feeds, timeout=target.patience), "a difference")


def names(kind: str, target: Target) -> None:
    """Inputs are given, and outputs taken, by the names in the file."""
    _require(kind, target)
    network, feeds = _difference(), [_numbers("float32", (3,), seed) for seed in (1, 2)]
    with target.prepared(network.model(kind)) as model:
        found = model.run(timeout=target.patience, b=feeds[1], a=feeds[0])
        _same(network, feeds, [found["y"], found["z"]], "by name")  # type: ignore[call-overload]


def open_sizes(kind: str, target: Target) -> None:
    """Sizes that the file leaves open are those of each request, in one burst, too."""
    _require(kind, target)
    network = _negation("float32", (None, 3))
    with target.prepared(network.model(kind)) as model, model.burst(input_shapes=[(8, 3)]) as burst:
        for rows in (8, 1, 3, 8):
            x = _numbers("float32", (rows, 3), rows)
            _same(network, [x], model.run(x, timeout=target.patience), f"{rows} rows")
            _same(network, [x], burst.run(x, timeout=target.patience).outputs, f"{rows} rows in a burst")


def short_output(kind: str, target: Target) -> None:
    """An output that is a byte too small is reported with its shape, and the next request is answered."""
    _require(kind, target)
    case = _negation("float32", (6,)).case(kind, [_numbers("float32", (6,))])
    with target.prepared(case.model) as model:
        check_short(target.bench.execute(model, case, [23], target.patience))
        found = target.bench.execute(model, case, [24], target.patience)
        check(not found.status, f"after a short output, a valid request gets {found.status.name}")


def pools(kind: str, target: Target) -> None:
    """A burst's requests take arguments from several pools, at any offset, and write to no other byte of them."""
    _require(kind, target)
    network, feeds = _difference(), [_numbers("float32", (3,), seed) for seed in (1, 2)]
    case = network.case(kind, feeds)
    given, taken = Memory.create(1 << 13), Memory.create(1 << 13)
    with target.prepared(case.model) as model, model.burst() as burst:
        for offset in (0, 64, 4, 4):
            raw = taken.asarray(np.uint8, 1 << 13)
            raw[:] = 0xA5
            places = [ArgumentPlace(given, offset), ArgumentPlace(given, 4096 + offset)]
            places += [ArgumentPlace(taken, offset), ArgumentPlace(taken, 4096 + offset)]
            asked = request(case, places, output_sizes(case))
            found = answer(partial(burst.execute, timeout=target.patience), asked)
            check(not found.status, f"at offset {offset}, the status is {found.status.name}: {found.message}")
            _same(network, feeds, [array.view(np.float32) for array in found.outputs], f"at offset {offset}")
            check((raw != 0xA5).sum() <= 24, f"at offset {offset}, bytes beside the outputs were written")


def concurrent(kind: str, target: Target) -> None:
    """Clients of one prepared file that run at the same time get their own results."""
    _require(kind, target)
    network = _negation("float32", (None, 4))

    def client(seed: int, model: RemotePreparedModel) -> None:
        with model.burst(input_shapes=[(8, 4)]) as burst:
            for number in range(_RUNS):
                x = _numbers("float32", (1 + (seed + number) % 8, 4), seed * _RUNS + number)
                _same(network, [x], burst.run(x, timeout=target.patience).outputs, "beside other clients")

    with target.prepared(network.model(kind)) as model, ThreadPoolExecutor(_CLIENTS) as threads:
        for future in [threads.submit(client, seed, model) for seed in range(_CLIENTS)]:
            future.result(2 * target.patience)


def damaged(kind: str, target: Target) -> None:
    """A file that is none of its kind is refused in words, and no damage ends the device."""
    _require(kind, target)
    network = _negation("float32", (5,))
    with target.prepared(network.model(kind)):
        pass
    said = _refusal(network.model(kind, b"no model file at all"), target)
    check(len(said.split()) > 3, f"a file that is damaged is refused without a reason: {said!r:.100}")
    whole = bytes(network.model(kind).main.operands[0].value)
    for size in range(0, len(whole), max(1, len(whole) // 8)):
        try:
            with target.prepared(network.model(kind, whole[:size] or b"\\0")):
                pass
        except StatusError:
            continue
    x = _numbers("float32", (5,))
    with target.prepared(network.model(kind)) as model:
        _same(network, [x], model.run(x, timeout=target.patience), "after damaged files")


def another_type(kind: str, target: Target) -> None:
    """A model whose input or number of inputs is not the file's is refused."""
    _require(kind, target)
    written = bytes(_negation("float32", (5,)).model(kind).main.operands[0].value)
    _refusal(_negation("int32", (5,)).model(kind, written), target)
    _refusal(_difference().model(kind, written), target)


def not_alone(kind: str, target: Target) -> None:
    """A file with an operation beside it is no model: the file is the whole of it."""
    _require(kind, target)
    main = _negation("float32", (5,)).model(kind).main
    operands = [
        *main.operands[:2],
        Operand("TENSOR_FLOAT32", (5,), lifetime="TEMPORARY_VARIABLE"),
        Operand("INT32", (), lifetime="CONSTANT_COPY", value=np.zeros((), np.int32)),
        main.operands[2],
    ]
    steps = [Operation(main.operations[0].type, [0, 1], [2]), Operation("ADD", [2, 2, 3], [4])]
    model = Model(Subgraph(operands, steps, [1], [4]))
    check(not target.supported(model)[0], "the device supports a file that is one of several operations")
    check(target.device.explain(model)[0], "there is no reason against a file that is one of several operations")
    _refusal(model, target)


def deadline(kind: str, target: Target) -> None:
    """A run of seconds ends at its deadline, and the next request is answered."""
    _require(kind, target)
    if kind in _UNSTOPPABLE:
        skip(f"frameworks that run .{kind} files cannot be told to end a run")
    case = Case("long", _long().model(kind), (np.zeros((_SIDE, _SIDE), np.float32),), (None,))
    given_up = _given_up(kind, target, "after a missed deadline")
    with given_up, target.prepared(case.model) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            begin = time.monotonic()
            run = partial(execute, timeout=target.patience, deadline=begin + _SOON)
            found = target.bench.execute(model, case, [4 * _SIDE**2], target.patience, run=run)
            check(found.status in _MISSED, f"a run of seconds with a deadline of {_SOON} s gets {found.status.name}")
            late = time.monotonic() - begin - _SOON
            check(late < _LATE, f"a run of seconds ended {late:.2f} s after its deadline")


def client_gone(kind: str, target: Target) -> None:
    """A burst that is closed in the middle of a run of seconds does not keep the device from others."""
    _require(kind, target)
    network, x = _long(), np.zeros((_SIDE, _SIDE), np.float32)
    with _given_up(kind, target, "when the model was closed, too"), target.prepared(network.model(kind)) as model:
        with model.burst() as burst:
            burst.submit(x)
        _check_small(kind, target, "after a burst was closed")


@contextmanager
def _given_up(kind: str, target: Target, what: str) -> Iterator[None]:
    """Runs of seconds are given up within the block; the device answers after it.

    However the block ends, they have ended then, or the engine has over them: the next test is not to pay for them.
    """
    try:
        yield
    finally:
        try:
            _check_small(kind, target, what)  # it waits for their slot
        finally:
            target.settle()


def _check_small(kind: str, target: Target, what: str) -> None:
    network, x = _negation("float32", (5,)), _numbers("float32", (5,))
    with target.prepared(network.model(kind)) as model:
        _same(network, [x], model.run(x, timeout=target.patience), what)


def _weights(place: str) -> bytes:
    return onnx_file(_difference(), {"b": place})


def _apart() -> Network:
    """Return `_difference` with a second input that is no input of the file: its weights lie in another file."""
    whole = _difference()
    return Network(whole.inputs[:1], whole.outputs, whole.steps)


def weights_beside(target: Target) -> None:
    """Weights in other files are those that came along."""
    _require("onnx", target)
    feeds = [_numbers("float32", (3,), seed) for seed in (1, 2)]
    for place in ("w.bin", "deeper/w.bin"):
        external = {place: feeds[1].view(np.uint8)}
        with target.prepared(_apart().model("onnx", _weights(place), external)) as model:
            _same(_difference(), feeds, model.run(feeds[0], timeout=target.patience), f"weights in {place}")


def weights_missing(place: str, target: Target) -> None:
    """A file that did not come along is not opened, nor is one outside of the model's folder; the error names it."""
    _require("onnx", target)
    said = _refusal(_apart().model("onnx", _weights(place)), target)
    check(place in said, f"the error does not name the missing file {place!r}: {said!r:.200}")
    if place in _OUTSIDE:
        _refusal(_apart().model("onnx", _weights(place), {place: np.zeros(12, np.uint8)}), target)
