"""The drop-in for LiteRT's interpreter beside the real one: random models, and programs that use them at random."""

import re

import numpy as np
import pytest
from kills import kill
from lite_nets import Writer, spread

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert import interpreter as package

import driver.dropin.litert as dropin
from driver.dropin.device_model import connections

UNARY = ["ABS", "COS", "EXP", "FLOOR", "LOGISTIC", "NEG", "RELU", "RELU6", "SIN", "SQUARE", "TANH"]
BINARY = ["ADD", "DIV", "MAXIMUM", "MINIMUM", "MUL", "SQUARED_DIFFERENCE", "SUB"]


class RandomNet:
    """A model of operators that are chosen at random, each on one of the values that there are."""

    def __init__(self, seed):
        self.random, self.w = np.random.default_rng(seed), Writer(seed)
        four = self.random.integers(2)
        self.shape = (1, 6, 5, 3) if four else (1, 7)
        count = self.random.integers(1, 3)
        self.values = [(self.w.input(self.shape, signature=(-1, *self.shape[1:])), self.shape) for _ in range(count)]
        for _ in range(self.random.integers(1, 7)):
            x, shape = self.values[self.random.integers(len(self.values))]
            kinds = [self.unary, self.binary, self.joined, self.rounded, self.soft, *self.of_rank(len(shape))]
            self.values.append(kinds[self.random.integers(len(kinds))](x, shape))
        outputs = [self.values[-1][0]]
        if self.random.integers(2):
            outputs.append(self.values[self.random.integers(count, len(self.values))][0])
        if not self.random.integers(4):
            outputs.append(self.placed())
        self.data = self.w.file(list(dict.fromkeys(outputs)))

    def of_rank(self, rank):
        return [self.convolved, self.mean, self.flat, self.turned] if rank == 4 else [self.dense, self.filtered]

    def unary(self, x, shape):
        return self.w.operator(UNARY[self.random.integers(len(UNARY))], [x], shape), shape

    def binary(self, x, shape):
        same = [value for value, its in self.values if its == shape]
        other = same[self.random.integers(len(same))] if self.random.integers(2) else self.w.random(shape)
        return self.w.operator(BINARY[self.random.integers(len(BINARY))], [x, other], shape), shape

    def joined(self, x, shape):
        wide = (*shape[:-1], 2 * shape[-1])
        return self.w.operator("CONCATENATION", [x, x], wide, Axis=len(shape) - 1), wide

    def rounded(self, x, shape):
        """By int8 and back."""
        scale = {"scale": 0.05, "zero_point": 3}
        small = self.w.operator("QUANTIZE", [x], shape, "int8", **scale)
        if self.random.integers(2):
            small = self.w.operator("ADD", [small, small], shape, "int8", **scale)
        return self.w.operator("DEQUANTIZE", [small], shape), shape

    def soft(self, x, shape):
        return self.w.operator("SOFTMAX", [x], shape, Beta=1.0), shape

    def convolved(self, x, shape):
        made, weights = (*shape[:3], 4), [self.w.random((4, 3, 3, shape[3])), self.w.random((4,))]
        return self.w.operator("CONV_2D", [x, *weights], made, Padding=0, StrideW=1, StrideH=1), made

    def mean(self, x, shape):
        made = (shape[0], 1, 1, shape[3])
        return self.w.operator("MEAN", [x, self.w.constant(np.int32([1, 2]))], made, KeepDims=True), made

    def flat(self, x, shape):
        made = (shape[0], int(np.prod(shape[1:])))
        return self.w.operator("RESHAPE", [x, self.w.constant(np.int32([-1, made[1]]))], made), made

    def turned(self, x, shape):
        made = (shape[0], shape[2], shape[1], shape[3])
        return self.w.operator("TRANSPOSE", [x, self.w.constant(np.int32([0, 2, 1, 3]))], made), made

    def dense(self, x, shape):
        made, weights = (shape[0], 5), [self.w.random((5, shape[1])), self.w.random((5,))]
        return self.w.operator("FULLY_CONNECTED", [x, *weights], made), made

    def filtered(self, x, shape):
        """With a state."""
        weights, state = [self.w.random((3, shape[1])), self.w.random((3, 2)), -1], self.w.variable((1, 6))
        return self.w.operator("SVDF", [x, *weights, state], (1, 3), Rank=1), (1, 3)

    def placed(self):
        """Places of what is positive: how many, only a run knows."""
        x, shape = self.values[-1]
        zeros = self.w.constant(np.zeros(shape, np.float32))
        is_positive = self.w.operator("GREATER", [x, zeros], shape, "bool")
        return self.w.operator("WHERE", [is_positive], (0, len(shape)), "int64")


def actions(random, count=16):
    """What a program does, as (what, number). It reads nothing that no run has made since memory was allocated."""
    names = ["allocate", "set", "set", "invoke", "invoke", "invoke", "get", "get", "resize", "reset", "told"]
    steps, is_made = [("allocate", 0), ("set", 0), ("invoke", 0), ("get", 0)], True
    while len(steps) < count:
        what = names[random.integers(len(names))]
        is_made = what == "invoke" or (is_made and what not in {"allocate", "resize"})
        if is_made or what != "get":
            steps.append((what, int(random.integers(100))))
        if what in {"allocate", "resize"}:
            steps.append(("set", int(random.integers(100))))
    return steps


def done(interpreter, what, number):
    """The outcome of one of them."""
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    match what:
        case "allocate":
            interpreter.allocate_tensors()
        case "set":
            for n, told in enumerate(inputs):
                interpreter.set_tensor(told["index"], spread(number + n, *told["shape"]))
        case "invoke":
            interpreter.invoke()
        case "get":
            return [interpreter.get_tensor(told["index"]) for told in outputs if told["shape"].all()]
        case "resize":
            for told in inputs:
                interpreter.resize_tensor_input(told["index"], (1 + number % 3, *told["shape"][1:]))
            interpreter.allocate_tensors()
        case "reset":
            interpreter.reset_all_variables()
    return [inputs, outputs]


def plain(value):
    """Something equal for equal bits."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def history(interpreter, steps, kill_before=None):
    """What a program sees of all its actions, up to the first error."""
    seen = []
    for n, (what, number) in enumerate(steps):
        if n == kill_before:
            kill(connections.to("litert"))
        try:
            seen.append((what, plain(done(interpreter, what, number))))
        except (RuntimeError, ValueError) as error:
            seen.append((what, type(error), re.sub("0x[0-9a-f]+", "0x", str(error))))
            break
    return seen


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_on_a_random_model(counted, seed):
    """All that it sees is what it sees with the real class, bit for bit; in each fourth one the device is killed."""
    net, random = RandomNet(seed), np.random.default_rng(seed + 1000)
    steps, resolvers = actions(random), list(package.OpResolverType)
    given = {"model_content": net.data, "num_threads": [None, 1, 2][random.integers(3)]}
    given["experimental_op_resolver_type"] = resolvers[random.integers(len(resolvers))]
    expected = history(package.Interpreter(**given), steps)
    found = history(dropin.Interpreter(**given), steps, kill_before=5 if seed % 4 == 3 else None)
    assert found == expected
    assert counted()["in_process"] == []
