"""What does a step cost whose state grows, beside ONNX Runtime in process?

    python bench/state.py [--tensors 60] [--steps 60] [--pairs 9] [--json FILE]

A state of 60 tensors, each 1 x 3 x n x 64 of float32, as the keys and values of a small language model; a step appends
one row to all. In process: `OrtValue`s that are bound by `IOBinding`, so that nothing is copied. Burst: a buffer of the
device for each tensor, which is updated in place, and one request a step; as a stream, the engine repeats the step by
itself; to open it is all up to the second result, for which the engine binds its requests. The state of fixed size
drops its oldest row at each step. Rows are of the mean step after the second.
Client on CPU 0, device on CPU 1, one thread each; the last state of all ways is compared.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from measure import Runs, rounds, scratch
from own_device import own_device, pin
from question import Question, against, interval, times

import driver
from burst import Memory, Request, RequestArgument

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.client.device_buffers import Buffer

GROWS, FIXED = "grows by a row", "of fixed size"
HEADS, ROW, BEGIN = 3, 64, 16
X_BYTES = 4 * HEADS * ROW
OPENING = 2  # results of a stream: of a request like any other, and of the first step by the engine


class Way(Protocol):
    """A way to execute steps."""

    def begin(self) -> None:
        """Makes the state one of zeros, with 16 rows."""

    def step(self) -> None:
        """Appends a row of ones."""

    def state(self) -> NDArray[np.float32]:
        """The first tensor of the state."""


def write_model(path: Path, tensors: int, *, grows: bool) -> None:
    """An .onnx file of `tensors` times Concat; before it, where the size stays, Slice."""
    from onnx import TensorProto, helper, numpy_helper, save

    def tensor(name: str, rows: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, HEADS, rows, ROW])

    nodes, (old, new) = [], ("n", "m") if grows else (BEGIN, BEGIN)
    for n in range(tensors):
        kept = f"past_{n}" if grows else f"kept_{n}"
        if not grows:
            nodes.append(helper.make_node("Slice", [f"past_{n}", "one", "end", "axis"], [kept]))
        nodes.append(helper.make_node("Concat", [kept, "x"], [f"present_{n}"], axis=2))
    graph = helper.make_graph(
        nodes,
        "state",
        [tensor("x", 1), *(tensor(f"past_{n}", old) for n in range(tensors))],
        [tensor(f"present_{n}", new) for n in range(tensors)],
        [numpy_helper.from_array(np.array([v]), k) for k, v in {"one": 1, "end": BEGIN, "axis": 2}.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


class InProcess:
    """A session in this process, on one thread."""

    def __init__(self, path: Path, tensors: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options)
        self.made = onnxruntime.OrtValue.ortvalue_from_numpy
        self.names = [(f"past_{n}", f"present_{n}") for n in range(tensors)]
        self.x = self.made(np.ones((1, HEADS, 1, ROW), np.float32))

    def begin(self) -> None:
        self.values = [self.made(np.zeros((1, HEADS, BEGIN, ROW), np.float32)) for _ in self.names]

    def step(self) -> None:
        binding = self.session.io_binding()
        binding.bind_ortvalue_input("x", self.x)
        for (past, present), value in zip(self.names, self.values, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_output(present)
        self.session.run_with_iobinding(binding)
        self.values = binding.get_outputs()

    def state(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.values[0].numpy()
        return found


class InBurst:
    """A burst on a device."""

    def __init__(self, stack: ExitStack, device: driver.RemoteDevice, path: Path, tensors: int) -> None:
        prepared = stack.enter_context(device.prepare(driver.load(path)))
        self.burst = stack.enter_context(prepared.burst())
        self.states = [self._buffer(prepared, n) for n in range(tensors)]
        x = Memory.create(X_BYTES)
        x.asarray(np.float32)[:] = 1
        inputs = (RequestArgument(length=X_BYTES), *(RequestArgument(pool=1 + n) for n in range(tensors)))
        self.request = Request(inputs, inputs[1:], (x, *self.states))

    @staticmethod
    def _buffer(prepared: driver.RemotePreparedModel, n: int) -> Buffer:
        roles = [driver.BufferRole(0, 1 + n)], [driver.BufferRole(0, n)]
        return prepared.device.allocate(driver.BufferDesc(in_place=True), [prepared], *roles)

    def begin(self) -> None:
        for state in self.states:
            state.copy_from(np.zeros((1, HEADS, BEGIN, ROW), np.float32))

    def step(self) -> None:
        self.burst.execute(self.request).raise_for_status()

    def state(self) -> NDArray[np.float32]:
        newest = self.states[0]
        found = np.zeros(newest.dimensions, np.float32)
        newest.copy_to(found)
        return found


class AsStream:
    """A stream of results in a burst, of so many steps."""

    def __init__(self, stack: ExitStack, device: driver.RemoteDevice, path: Path, tensors: int, steps: int) -> None:
        prepared = stack.enter_context(device.prepare(driver.load(path)))
        self.burst = stack.enter_context(prepared.burst(depth=8))
        self.feedback = {f"present_{n}": f"past_{n}" for n in range(tensors)}
        self.first = {name: np.zeros((1, HEADS, BEGIN, ROW), np.float32) for name in self.feedback.values()}
        self.first["x"] = np.ones((1, HEADS, 1, ROW), np.float32)
        self.steps = steps

    def begin(self) -> None:
        self.stream = self.burst.stream_results(self.first, feedback=self.feedback, most=self.steps)

    def step(self) -> None:
        next(self.stream)

    def state(self) -> NDArray[np.float32]:
        newest = self.stream.state["past_0"]
        found = np.zeros(newest.dimensions, np.float32)
        newest.copy_to(found)
        return found


def block(way: Way, steps: int) -> dict[str, float]:
    """The mean step after the second one, from a state of 16 rows on, and what comes before it."""
    opened = time.perf_counter()
    way.begin()
    for _ in range(OPENING):
        way.step()
    begin = time.perf_counter()
    for _ in range(steps - OPENING):
        way.step()
    return {"us": (time.perf_counter() - begin) / (steps - OPENING) * 1e6, "ms": (begin - opened) * 1e3}


def run(args: argparse.Namespace) -> Runs:
    """All rounds: every way once, the next round backwards."""
    runs = Runs()
    with ExitStack() as stack:
        folder, device = stack.enter_context(scratch()), stack.enter_context(own_device("onnxruntime"))
        ways: dict[str, Way] = {}
        for kind in (GROWS, FIXED):
            path = folder / f"{kind.replace(' ', '_')}.onnx"
            write_model(path, args.tensors, grows=kind == GROWS)
            ways[own(kind)] = InProcess(path, args.tensors)
            ways[ours(kind)] = InBurst(stack, device, path, args.tensors)
            ways[streamed(kind)] = AsStream(stack, device, path, args.tensors, args.steps)
        for name in rounds(args.pairs, list(ways)):
            pin(device)
            runs.add(name, block(ways[name], args.steps))
        for kind in (GROWS, FIXED):
            wanted = ways[own(kind)].state()
            if not all(np.array_equal(wanted, way.state()) for way in (ways[ours(kind)], ways[streamed(kind)])):
                raise SystemExit(
                    f"bench: the state that {kind} is not the same in process, in the burst and as a stream"
                )
    return runs


def own(kind: str) -> str:
    """The row of the runtime in process."""
    return f"{kind}, in process"


def ours(kind: str) -> str:
    """The row of the burst."""
    return f"{kind}, in a burst"


def streamed(kind: str) -> str:
    """The row of the stream."""
    return f"{kind}, as a stream"


def settle(args: argparse.Namespace) -> None:
    """A request has at most so many pools."""
    if not 1 <= args.tensors <= 120:
        raise ValueError("--tensors: from 1 to 120")
    if args.quick:
        args.steps = min(args.steps, 6)


def to_open(runs: Runs, name: str) -> str:
    """A column: of streams."""
    return interval("ms")(runs, name) if name in {streamed(GROWS), streamed(FIXED)} else ""


GROWN, STAYED = (against(own(kind), "us") for kind in (GROWS, FIXED))
STATE = Question(
    __doc__,
    run,
    {
        "us a step": interval("us"),
        "x in process": lambda runs, name: times(GROWN if name.startswith(GROWS) else STAYED, own(GROWS), own(FIXED))(
            runs, name
        ),
        "ms to open": to_open,
    },
    options={
        "--tensors": {"type": int, "default": 60, "help": "of the state (default 60)"},
        "--steps": {"type": int, "default": 60, "help": "of a block (default 60)"},
    },
    settle=settle,
    figures=("us",),
    estimates={"grown": GROWN, "stayed": STAYED},
    label=lambda name: name,
    ours=(ours(GROWS), ours(FIXED), streamed(GROWS), streamed(FIXED)),
    kept=("tensors", "steps"),
    bars=("us", "us a step"),
)

if __name__ == "__main__":
    STATE.answer()
