"""A slot that is kept for higher priorities is there on each way in, while lower executions hold all others."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from onnx.helper import make_node
from waiting import PATIENCE, until

import driver
from driver import Batch

sys.path[:0] = [str(Path(__file__).parents[1] / "devices")]
import onnx_files  # noqa: E402  # for what writes models

NAME = "burst_test_devices.joining:Together"
SLOTS = 4  # that it has
OTHERS = 2 * SLOTS
HELD, FREE = -2.0, 5.0  # by which an execution begins


def row(first):
    return np.full((1, 4), first, np.float32)


# ---- ways in: each opens one, of a prepared model, and returns what makes the first number of an output of an input


def plain(_, prepared, __):
    return lambda x: prepared.run(x, timeout=PATIENCE)[0].flat[0]


def launched(prepared, kit, method):
    """`method`: of the prepared model."""

    def run(x):
        request, _ = kit.request([x], x.nbytes)
        return getattr(prepared, method)(request).result(PATIENCE).outputs[0].flat[0]

    return run


def asynchronous(_, prepared, kit):
    return launched(prepared, kit, "execute_async")


def fenced(_, prepared, kit):
    return launched(prepared, kit, "execute_fenced")


def in_burst(stack, prepared, _):
    burst = stack.enter_context(prepared.burst(input_shapes=[(1, 4)]))
    return lambda x: burst.run(x, timeout=PATIENCE).outputs[0].flat[0]


def stream(stack, prepared, _):
    burst = stack.enter_context(prepared.burst(input_shapes=[(1, 4)]))

    def run(x):
        (result,) = burst.stream_results([x], feedback={"y": "x"}, most=1, also=["y"])
        return result.outputs["y"].flat[0]

    return run


ROWS = Batch(rows=8)
CASES = [(way, None) for way in (plain, asynchronous, fenced, in_burst, stream)] + [(plain, ROWS), (in_burst, ROWS)]


@pytest.fixture
def files(tmp_path):
    """Two models, as one has two joined runs at a time. `rows`: of their inputs."""

    def found(rows):
        for operation in ("Add", "Mul"):
            sides = [("x", "float32", (rows, 4))], [("y", "float32", (rows, 4))]
            path = tmp_path / f"{operation}.onnx"
            path.write_bytes(onnx_files.written([make_node(operation, ["x", "x"], ["y"])], *sides))
            yield driver.load(path)

    return found


@pytest.fixture
def hold(home):
    """The file while which executions that begin with HELD go on. None of an earlier test has run."""
    (home.path / "runs").unlink(missing_ok=True)
    path = home.path / f"hold{HELD:g}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def held(home):
    """How many such executions have begun."""
    return sum(f"{HELD:g}" in line.split() for line in (home.path / "runs").read_text().splitlines())


@pytest.mark.parametrize(("way", "batch"), CASES, ids=lambda value: getattr(value, "__name__", value and "joined"))
def test_a_high_request_runs_while_all_low_ones_hold(way, batch, files, home, hold, kit):
    """Eight low ones are there, and three of them hold three of four slots, whichever way all came."""
    with driver.connect(NAME) as device, ThreadPoolExecutor(OTHERS) as threads, ExitStack() as stack:
        models = list(files("n" if batch else 1))

        def opened(n, priority):
            prepared = stack.enter_context(device.prepare(models[n % 2], batch=batch, priority=priority))
            return way(stack, prepared, kit)

        high, low = opened(0, "high"), [opened(n, "low") for n in range(OTHERS)]
        assert high(row(FREE)) == FREE + 1
        stack.callback(hold.unlink, missing_ok=True)
        futures = [threads.submit(run, row(HELD)) for run in low]

        def is_full():
            assert high(row(FREE)) == FREE + 1
            return held(home) == SLOTS - 1 and device.stats()["priorities"]["low"]["waiting"]

        until(is_full)
        assert high(row(FREE)) == FREE + 1
        assert held(home) == SLOTS - 1
        assert not any(future.done() for future in futures)
        hold.unlink()
        assert [future.result(PATIENCE) for future in futures] == [HELD + 1] * OTHERS
