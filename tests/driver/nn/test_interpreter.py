import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from driver.nn import (
    ExecutionFailed,
    Interpreter,
    Model,
    ModelBuilder,
    Operand,
    Operation,
    OutputInsufficientSize,
    Subgraph,
)


@pytest.fixture
def add():
    """x + x, on four floats."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4))
    m.output(m.operation("ADD", x, x, 0))
    return m.build()


def reshaping():
    """RELU of an input whose target shape is another input."""
    m = ModelBuilder()
    x, target = m.input("float32", (2, 3)), m.input("int32", (2,))
    m.output(m.operation("RELU", m.operation("RESHAPE", x, target)))
    return m.build()


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def room(size):
    return np.zeros(size, np.uint8)


def test_add_is_one_call_of_numpy(add):
    """The kernel of ADD is np.add itself, bound to the caller's arrays: no Python frame, no copy."""
    x, out = np.ones((1, 4), np.float32), room(16)
    run = Interpreter(add).bind([x], [out]).run
    assert isinstance(run, partial)
    assert run.func is np.add
    assert run.args[0] is x
    assert run.args[2].base is not None
    assert np.shares_memory(run.args[2], out)


def test_a_binding_runs_again_and_again(add):
    """Each run reads what the input holds then."""
    x, out = np.ones((1, 4), np.float32), room(16)
    bound = Interpreter(add).bind([x], [out])
    for value in (1, 2, 3):
        x[:] = value
        bound.run()
        assert (out.view(np.float32) == 2 * value).all()


def test_static_runs_allocate_once():
    """The steps of a static model are built by bind, and run only calls them."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4))
    m.output(m.operation("TANH", m.operation("ADD", x, [1.0], 1)))
    bound = Interpreter(m.build()).bind([np.zeros((1, 4), np.float32)], [room(16)])
    assert [step.func for step in bound.run.args[0]] == [np.add, np.maximum, np.tanh]


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("extra", [0, 5])
def test_output_buffers_of_any_length_and_alignment(add, offset, extra):
    """The result is written to the beginning of the buffer, and nothing behind it."""
    memory = np.full(offset + 16 + extra, 0xAB, np.uint8)
    Interpreter(add).bind([np.ones((1, 4), np.float32)], [memory[offset:]]).run()
    assert memory[offset : offset + 16].tobytes() == np.full(4, 2, np.float32).tobytes()
    assert (memory[:offset] == 0xAB).all()
    assert (memory[offset + 16 :] == 0xAB).all()


def test_shapes_of_a_static_model_are_known_at_once(add):
    """Bound.shapes gives dimensions and sufficiency before any run."""
    bound = Interpreter(add).bind([X[:1].repeat(4, 1)[:, :4]], [room(15)])
    assert bound.shapes == (((1, 4), False),)


def test_too_small_a_buffer_raises_with_all_shapes():
    """run raises OutputInsufficientSize with the shapes of all outputs, and writes nothing beyond any of them."""
    m = ModelBuilder()
    x = m.input("float32", (0, 2))
    m.output(m.operation("RELU", x), m.operation("ADD", x, [1.0], 0))
    memory = np.full(30, 0xAB, np.uint8)
    bound = Interpreter(m.build()).bind([np.ones((3, 2), np.float32)], [memory[:23], room(24)])
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[3, 2\]") as caught:
        bound.run()
    assert caught.value.shapes == (((3, 2), False), ((3, 2), True))
    assert (memory == 0xAB).all()


def test_too_small_a_buffer_of_a_dynamic_model():
    """A dynamic model finds out while it runs, computes on all the same, and reports every shape."""
    memory = np.full(30, 0xAB, np.uint8)
    bound = Interpreter(reshaping()).bind([X, np.array([3, 2], np.int32)], [memory[:23]])
    with pytest.raises(OutputInsufficientSize) as caught:
        bound.run()
    assert caught.value.shapes == bound.shapes == (((3, 2), False),)
    assert (memory == 0xAB).all()


def test_shapes_that_follow_from_values():
    """A target shape given as a model input is read in each run."""
    target, out = np.array([3, 2], np.int32), room(24)
    interpreter = Interpreter(reshaping())
    assert not interpreter.is_static
    bound = interpreter.bind([X, target], [out])
    for shape in ([3, 2], [1, 6], [-1, 1]):
        target[:] = shape[:2]
        bound.run()
        assert bound.shapes[0] == (np.empty(X.shape).reshape(shape).shape, True)
        assert out.view(np.float32).tolist() == X.ravel().tolist()


def test_parameters_may_be_computed():
    """A parameter that another operation computes is honoured."""
    m = ModelBuilder()
    x, half = m.input("float32", (1, 4)), m.input("int32", (2,))
    m.output(m.operation("RESHAPE", x, m.operation("ADD", half, half, 0)))
    bound = Interpreter(m.build()).bind([np.ones((1, 4), np.float32), np.array([1, 1], np.int32)], [room(16)])
    bound.run()
    assert bound.shapes == (((2, 2), True),)


def test_unknown_dimensions():
    """An input of unknown rank takes what it is given."""
    m = ModelBuilder()
    m.output(m.operation("RELU", m.input("float32", ())))
    interpreter = Interpreter(m.build())
    for shape in [(4,), (2, 3), (1, 2, 3)]:
        assert interpreter.bind([np.ones(shape, np.float32)], [room(64)]).shapes == ((shape, True),)


def test_a_result_that_contradicts_its_declaration_fails():
    """Declared output dimensions that the operation does not have fail, with the operation in the message."""
    m = ModelBuilder()
    x = m.input("float32", (0,))
    m.output(m.operation("RELU", x, dimensions=(2,)))
    interpreter = Interpreter(m.build())
    with pytest.raises(ExecutionFailed, match=r"operation 0 \(RELU\): .*declared \[2\] but has dimensions \[3\]"):
        interpreter.bind([np.ones(3, np.float32)], [room(64)])


def quantised(lifetime_of_relu):
    """RELU6 of quantised data, its result declared with another scale, then DEQUANTIZE."""
    q = "TENSOR_QUANT8_ASYMM"
    operands = [
        Operand(q, (2,), 0.5, 0, "INPUT"),
        Operand(q, (2,), 0.25, 0, lifetime_of_relu),
        Operand("TENSOR_FLOAT32", (2,), lifetime="OUTPUT"),
    ]
    operations = [Operation("RELU6", (0,), (1,)), Operation("DEQUANTIZE", (1,), (2,))]
    outputs = (2,) if lifetime_of_relu == "TEMPORARY" else (1, 2)
    return Interpreter(Model(Subgraph(operands, operations, (0,), outputs)))


def test_temporaries_get_the_computed_quantisation():
    """A temporary has the parameters that its operation computes, whatever was declared."""
    out = room(8)
    quantised("TEMPORARY").bind([np.array([2, 255], np.uint8)], [out]).run()
    assert out.view(np.float32).tolist() == [1, 6]


def test_outputs_must_declare_the_computed_quantisation():
    """A model output declared with other parameters fails."""
    with pytest.raises(ExecutionFailed, match=r"has to have scale 0\.5 and zero point 0"):
        quantised("OUTPUT").bind([np.zeros(2, np.uint8)], [room(2), room(8)])


def test_an_omitted_input_fails_where_it_is_needed(add):
    """None for an input that the operation needs fails by name."""
    with pytest.raises(ExecutionFailed, match="operand 0 is omitted"):
        Interpreter(add).bind([None], [room(16)])


def test_an_omitted_input_serves_where_it_may_be_omitted():
    """None for the axes of SQUEEZE means all of size 1."""
    m = ModelBuilder()
    m.output(m.operation("SQUEEZE", m.input("float32", (1, 2, 1)), m.input("int32", (1,))))
    bound = Interpreter(m.build()).bind([np.ones((1, 2, 1), np.float32), None], [room(8)])
    bound.run()
    assert bound.shapes == (((2,), True),)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ones((1, 4), np.float64), "got an array of float64"),
        (np.ones((1, 5), np.float32), r"declared \[1, 4\] got an array of dimensions \[1, 5\]"),
        (np.ones(4, np.float32), r"dimensions \[4\]"),
    ],
)
def test_arrays_that_do_not_fit(add, array, reason):
    """bind refuses arrays of another type or shape than the model declares."""
    with pytest.raises(ValueError, match=reason):
        Interpreter(add).bind([array], [room(16)])


def test_empty_tensors():
    """Operations that take no empty tensor fail on one, the others give an empty result."""
    m = ModelBuilder()
    x = m.input("float32", (0, 2))
    m.output(m.operation("RELU", x))
    assert Interpreter(m.build()).bind([np.ones((0, 2), np.float32)], [room(1)]).shapes == (((0, 2), True),)
    m = ModelBuilder()
    m.output(m.operation("MEAN", m.input("float32", (0, 2)), [0], 0))
    with pytest.raises(ExecutionFailed, match="takes no empty tensor"):
        Interpreter(m.build()).bind([np.ones((0, 2), np.float32)], [room(8)])


EMPTY_BATCHES = {
    "CONV_2D": lambda m, x: m.operation("CONV_2D", x, np.ones((1, 2, 2, 2), np.float32), [0.0], 1, 1, 1, 0),
    "DEPTHWISE_CONV_2D": lambda m, x: m.operation(
        "DEPTHWISE_CONV_2D", x, np.ones((1, 2, 2, 2), np.float32), [0.0, 0.0], 1, 1, 1, 1, 0
    ),
    "AVERAGE_POOL_2D": lambda m, x: m.operation("AVERAGE_POOL_2D", x, 1, 1, 1, 2, 2, 0),
    "MAX_POOL_2D": lambda m, x: m.operation("MAX_POOL_2D", x, 1, 1, 1, 2, 2, 0),
    "FULLY_CONNECTED": lambda m, x: m.operation("FULLY_CONNECTED", x, np.ones((3, 32), np.float32), [0.0] * 3, 0),
    "SOFTMAX": lambda m, x: m.operation("SOFTMAX", x, 1.0),
    "LOGISTIC": lambda m, x: m.operation("LOGISTIC", x),
    "TANH": lambda m, x: m.operation("TANH", x),
    "RELU6": lambda m, x: m.operation("RELU6", x),
    "MUL": lambda m, x: m.operation("MUL", x, [2.0], 0),
    "CONCATENATION": lambda m, x: m.operation("CONCATENATION", x, x, 3),
    "TRANSPOSE": lambda m, x: m.operation("TRANSPOSE", x, [0, 3, 1, 2]),
    "RESIZE_BILINEAR": lambda m, x: m.operation("RESIZE_BILINEAR", x, 8, 8),
    "QUANTIZE": lambda m, x: m.operation("QUANTIZE", x, scale=0.5),
    "DEQUANTIZE": lambda m, x: m.operation("DEQUANTIZE", m.operation("QUANTIZE", x, scale=0.5)),
}


@pytest.mark.parametrize("name", EMPTY_BATCHES)
def test_batches_of_nothing(name):
    """A batch of 0 images gives a batch of 0 results, the other dimensions as ever."""
    m = ModelBuilder()
    y = EMPTY_BATCHES[name](m, m.input("float32", (0, 4, 4, 2)))
    m.output(y)
    assert y.operand.dimensions[0] == 0
    bound = Interpreter(m.build()).bind([np.ones((0, 4, 4, 2), np.float32)], [room(1 << 22)])
    bound.run()
    assert bound.shapes == ((y.operand.dimensions, True),)


@pytest.mark.parametrize("name", EMPTY_BATCHES)
def test_inputs_of_any_stride_and_alignment(name, run_model):
    """Inputs may lie scattered in memory, or at an odd address."""
    m = ModelBuilder()
    m.output(EMPTY_BATCHES[name](m, m.input("float32", (3, 4, 4, 2))))
    model = m.build()
    x = np.random.default_rng(1).standard_normal((3, 4, 4, 2)).astype(np.float32)
    expected = run_model(model, x)[0].copy()
    odd = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    scattered = np.repeat(x, 2, axis=2)[:, :, ::2]
    for same in (odd, scattered, np.asfortranarray(x)):
        np.testing.assert_array_equal(run_model(model, same)[0], expected)


def test_results_too_large_for_the_hal():
    """A result of more than 4 GiB fails before anything is allocated."""
    m = ModelBuilder()
    m.output(m.operation("PAD", m.input("float32", (1,)), m.input("int32", (1, 2))))
    paddings = np.array([[2**31 - 1, 0]], np.int32)
    bound = Interpreter(m.build()).bind([np.ones(1, np.float32), paddings], [room(4)])
    with pytest.raises(ExecutionFailed, match="larger than 4 GiB"):
        bound.run()


def test_parameters_are_copied_before_they_are_checked(monkeypatch):
    """What a kernel is built from is a private copy: changing the input after the shape was checked has no effect."""
    target, out = np.array([3, 2], np.int32), room(24)
    interpreter = Interpreter(reshaping())
    kind = interpreter.prepared[0].kind
    seen = []

    def shape(call):
        result = kind.shape(call)
        target[:] = -77
        seen.append(call.values(1))
        return result

    hostile = type(kind)(kind.name, kind.code, kind.signatures, shape, kind.build, kind.quantisation)
    monkeypatch.setattr(
        interpreter,
        "prepared",
        [replace(interpreter.prepared[0], kind=hostile), *interpreter.prepared[1:]],
    )
    bound = interpreter.bind([X, target], [out])
    bound.run()
    assert seen == [[3, 2]]
    assert bound.shapes == (((3, 2), True),)


def test_constant_weights_are_transformed_once():
    """All bindings share the weights that were transformed when the interpreter was made."""
    m = ModelBuilder()
    m.output(
        m.operation(
            "FULLY_CONNECTED", m.input("float32", (1, 2)), np.ones((3, 2), np.float32), np.zeros(3, np.float32), 0
        )
    )
    interpreter = Interpreter(m.build())
    first, second = (interpreter.bind([np.ones((1, 2), np.float32)], [room(12)]).run.args[0][0] for _ in range(2))
    assert first.func is np.matmul
    assert first.args[1] is second.args[1]
    assert first.args[1].flags.c_contiguous


def test_weights_that_are_inputs_are_transformed_in_each_run():
    """Weights given at run time may change between runs."""
    m = ModelBuilder()
    x, w = m.input("float32", (1, 2)), m.input("float32", (3, 2))
    m.output(m.operation("FULLY_CONNECTED", x, w, np.zeros(3, np.float32), 0))
    weights, out = np.ones((3, 2), np.float32), room(12)
    bound = Interpreter(m.build()).bind([np.ones((1, 2), np.float32), weights], [out])
    for value in (1, 5):
        weights[:] = value
        bound.run()
        assert (out.view(np.float32) == 2 * value).all()


def test_pace_is_called_after_every_operation():
    """Preparing an operation, planning it, laying out its results and binding it each yield once."""
    m = ModelBuilder()
    x = m.input("float32", (2,))
    for _ in range(5):
        x = m.operation("RELU", x)
    m.output(x)
    calls = []
    interpreter = Interpreter(m.build(), pace=lambda: calls.append("prepare"))
    interpreter.bind([np.ones(2, np.float32)], [room(8)], pace=lambda: calls.append("bind"))
    assert calls == ["prepare"] * 3 * 5 + ["bind"] * 5


def test_bindings_run_in_several_threads_at_once():
    """Each binding has temporaries of its own: eight threads do not disturb each other."""
    m = ModelBuilder()
    x = m.input("float32", (1, 16, 16, 4))
    y = m.operation("CONV_2D", x, np.ones((4, 3, 3, 4), np.float32), np.ones(4, np.float32), 1, 1, 1, 1)
    m.output(m.operation("AVERAGE_POOL_2D", y, 2, 1, 1, 16, 16, 0))
    interpreter = Interpreter(m.build())
    start, wrong = threading.Barrier(8), []

    def work(value):
        image, out = np.full((1, 16, 16, 4), value, np.float32), room(16)
        bound = interpreter.bind([image], [out])
        bound.run()
        expected = out.copy()
        start.wait()
        for _ in range(30):
            bound.run()
            if (out != expected).any():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.integration
def test_kernels_of_absurd_length_are_refused():
    """A window that would take millions of steps fails instead of filling the memory with them."""
    m = ModelBuilder()
    m.output(m.operation("MAX_POOL_2D", m.input("float32", (1, 1, 1 << 20, 1)), 2, 1, 1, 1 << 19, 1, 0))
    with pytest.raises(ExecutionFailed, match="steps"):
        Interpreter(m.build()).bind([np.zeros((1, 1, 1 << 20, 1), np.float32)], [room(1 << 22)])
