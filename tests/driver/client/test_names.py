"""Inputs and outputs by name, values as the model means them, and shapes that vary: on every way to a result."""

import asyncio
import pickle

import numpy as np
import pytest

import driver
from driver.nn import TensorInfo

X, Y = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)


def difference_model(dimensions=(1, 2), dtype="float32", other="timeout"):
    """a - b, whose inputs are called "images" and `other`, and a + b."""
    m = driver.ModelBuilder()
    a, b = (m.input(dtype, dimensions, name=name) for name in ("images", other))
    m.output(m.operation("SUB", a, b, 0), m.operation("ADD", a, b, 0))
    return m.build()


def double_model(dimensions, dtype="float32"):
    m = driver.ModelBuilder()
    x = m.input(dtype, dimensions, name="x")
    m.output(m.operation("ADD", x, x, 0))
    return m.build()


@pytest.fixture(scope="module")
def reference(shared):
    with pytest.MonkeyPatch.context() as monkeypatch:
        shared.enter(monkeypatch)
        with driver.connect("reference") as device:
            yield device


@pytest.fixture(params=["device", "cpu", "divided"])
def prepare(request, reference):
    """prepare(model): on a device, in this process, or compiled for both."""
    made = []

    def prepare(model):
        if request.param == "device":
            made.append(reference.prepare(model))
        else:
            devices = ["cpu"] if request.param == "cpu" else [reference, "cpu"]
            made.append(driver.compile(model, devices))
        return made[-1]

    yield prepare
    for each in made:
        each.close()


def test_a_model_tells_its_inputs_and_outputs():
    """Name, dtype and shape; None where a size is open; a number for a name where there is none, or two are equal."""
    model = difference_model((0, 2))
    assert model.inputs[0] == TensorInfo("images", np.dtype(np.float32), (None, 2))
    assert [t.name for t in (*model.inputs, *model.outputs)] == ["images", "timeout", "output_0", "output_1"]
    assert str(model.inputs[0]) == "images: float32 [?, 2]"
    assert [t.name for t in difference_model(other="images").inputs] == ["images_0", "images_1"]
    unknown = driver.Operand("TENSOR_FLOAT32", (), lifetime="INPUT")
    assert driver.Model(driver.Subgraph([unknown], [], [0], [])).inputs[0].shape is None


def test_inputs_by_name(prepare):
    """In a dict or by keyword, on the plain path, in a burst, submitted and awaited; a dict takes any name."""
    prepared = prepare(difference_model())
    with prepared.burst() as burst:
        ways = [
            prepared.run(X, Y),
            prepared.run({"timeout": Y, "images": X}),
            asyncio.run(prepared.run_async({"images": X, "timeout": Y})),
            burst.run({"images": X, "timeout": Y}).outputs,
            burst.submit({"images": X, "timeout": Y}).result().outputs,
            asyncio.run(burst.run_async({"images": X, "timeout": Y})).outputs,
        ]
        for found in ways:
            np.testing.assert_array_equal(found[0], X - Y)
            np.testing.assert_array_equal(found["output_1"], X + Y)
        burst.inputs["images"][...] = Y
        burst.inputs["timeout"][...] = X
        np.testing.assert_array_equal(burst.run().outputs["output_0"], Y - X)


def test_inputs_by_keyword(prepare):
    """Where no option has the name."""
    prepared = prepare(difference_model(other="masks"))
    with prepared.burst() as burst:
        for found in (prepared.run(masks=Y, images=X), burst.run(masks=Y, images=X).outputs):
            np.testing.assert_array_equal(found[0], X - Y)
        frames = [{"images": X, "masks": Y}, (Y, X)]

        async def stream():
            return [result.outputs[0].copy() async for result in burst.stream(frames)]

        first, second = asyncio.run(stream())
        np.testing.assert_array_equal(first, X - Y)
        np.testing.assert_array_equal(second, Y - X)


def test_wrong_names_are_answered_with_the_right_ones(prepare):
    """And with the one that was meant; an input that is missing is named."""
    prepared = prepare(difference_model(other="masks"))
    with prepared.burst() as burst:
        for run in (prepared.run, burst.run, burst.submit):
            with pytest.raises(
                ValueError, match=r"no input 'image'; the model takes images, masks.*did you mean 'images'"
            ):
                run({"image": X, "masks": Y})
            with pytest.raises(TypeError, match=r"1 inputs were given by position and masks by name"):
                run(X, masks=Y)
            with pytest.raises(ValueError, match=r"1 inputs were given; the model takes 2: images, masks"):
                run(X)
        with pytest.raises(ValueError, match=r"input 1 \('masks'\) is None"):
            burst.run(images=X)
    with pytest.raises(KeyError, match=r"'boxes': the names are output_0, output_1"):
        prepared.run(X, Y)["boxes"]


def test_outputs_pickle_and_make_dicts(prepare):
    """They are tuples with names, wherever they go."""
    found = prepare(difference_model()).run(X, Y)
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again["output_0"], X - Y)
    assert dict(found).keys() == {"output_0", "output_1"}
    first, second = found
    assert (first is found[0], second is found[1], len(found)) == (True, True, 2)


def test_values_are_taken_as_the_model_means_them(prepare):
    """Integers of any width, numbers and lists, where they mean the same; else the input is named with the value."""
    prepared = prepare(double_model((1,), "int32"))
    with prepared.burst() as burst:
        for value in (np.array([7], np.int64), np.int64(7), 7, [7], np.array([7], np.uint8), True):
            assert (
                prepared.run(value)[0].tolist()
                == burst.run(value).outputs[0].tolist()
                == [2 * int(value if np.ndim(value) == 0 else value[0])]
            )
        for wrong, words in (
            (np.array([2**31], np.int64), r"input 0 \('x'\) holds 2147483648; the model takes int32"),
            (1.5, r"input 0 \('x'\) has dtype float64; the model takes int32"),
            (np.array([1.0], np.float32), r"has dtype float32; the model takes int32"),
            ([1, 2], r"has shape \(2,\); the model takes \(1,\)"),
        ):
            for run in (prepared.run, burst.run):
                with pytest.raises(ValueError, match=words):
                    run(wrong)
    floats = prepare(double_model((1, 2)))
    assert floats.run([[1, 2.5]])[0].tolist() == [[2.0, 5.0]]
    with pytest.raises(ValueError, match=r"has dtype float64; the model takes float32: convert it"):
        floats.run(np.ones((1, 2)))


def test_a_burst_takes_shapes_that_vary(reference):
    """One burst for all widths, smaller and larger, in turn and in flight at once."""
    with reference.prepare(double_model((0, 2))) as prepared:
        for options in ({}, {"input_shapes": [(3, 2)]}, {"input_shapes": {"x": (1, 2)}, "depth": 3}):
            with prepared.burst(**options) as burst:
                for rows in (3, 1, 700, 3, *range(1, 40), 2):
                    x = np.full((rows, 2), rows, np.float32)
                    result = burst.run(x)
                    assert result.outputs[0].shape == (rows, 2)
                    assert (result.outputs[0] == 2 * rows).all()
                    assert burst.inputs[0].shape == (rows, 2)
                futures = [burst.submit(np.full((rows, 2), rows, np.float32)) for rows in (5, 2, 9)]
                assert [f.result().outputs[0].shape[0] for f in futures] == [5, 2, 9]
                with pytest.raises(ValueError, match=r"input 0 \('x'\) has shape \(2, 3\); the model takes \(\?, 2\)"):
                    burst.run(np.ones((2, 3), np.float32))
                assert burst.run(np.ones((1, 2), np.float32)).outputs[0].tolist() == [[2.0, 2.0]]


def test_warm_up_runs_each_shape(prepare):
    """Once for each, and says what it needs."""
    prepared = prepare(double_model((4, 2)))
    prepared.warm_up()
    with prepared.burst() as burst:
        burst.warm_up()
        assert burst.stats()["runs"]["burst"] == 1


def test_warm_up_of_open_shapes(reference):
    """By position or by name; without them the input is named."""
    with reference.prepare(double_model((0, 2))) as prepared:
        prepared.warm_up([[(2, 2)], {"x": (5, 2)}])
        with pytest.raises(ValueError, match=r"input 0 \('x'\) has the open shape \(\?, 2\); give it with warm_up"):
            prepared.warm_up()
        with pytest.raises(ValueError, match=r"input 0 \('x'\) cannot be \(2, 3\)"):
            prepared.warm_up([{"x": (2, 3)}])
        with prepared.burst() as burst:
            burst.warm_up([{"x": (n, 2)} for n in (1, 2, 3)])
            assert burst.stats()["runs"]["burst"] == 3


def test_what_people_hold_is_shown_in_a_line(prepare):
    """Names, dtypes and shapes; never all operands."""
    model = difference_model((0, 2))
    prepared = prepare(difference_model())
    with prepared.burst() as burst:
        for shown in (repr(model), repr(prepared), repr(burst)):
            assert len(shown) < 300
            assert "float32" in shown
            assert "Operand" not in shown
    assert "images: float32 [?, 2]" in repr(model)


def test_outputs_are_a_tuple_and_a_mapping(prepare):
    """By name: `keys`, `values`, `items`, `get`, `in` and `dict`. By position: iteration, `len`, slices."""
    prepared = prepare(difference_model())
    with prepared.burst() as burst:
        for outputs in (prepared.run(X, Y), burst.run(X, Y).outputs, burst.submit(X, Y).result().outputs):
            difference, total = outputs
            assert (len(outputs), outputs[:1], outputs[-1]) == (2, (difference,), total)
            assert outputs.keys() == ("output_0", "output_1")
            assert list(map(id, outputs.values())) == list(map(id, outputs)) == [id(difference), id(total)]
            assert [name for name, _ in outputs.items()] == list(dict(outputs)) == list(dict(outputs.items()))
            assert outputs.get("output_1") is total
            assert outputs.get("nothing") is None
            assert outputs.get("nothing", 3) == outputs.get(2, 3) == 3
            assert "output_0" in outputs
            assert "nothing" not in outputs
            assert total in outputs
            assert total.copy() not in outputs


def test_a_result_prints_in_one_line(prepare):
    """Small arrays with their values, large ones by dtype and shape; a status by its name."""
    small, large = prepare(difference_model()), prepare(double_model((1, 600, 600)))
    with small.burst() as burst:
        result = burst.run(X, Y)
        assert f"{result}" == (
            "Result(NONE, (output_0: float32[1, 2] [[-9.0, -18.0]], output_1: float32[1, 2] [[11.0, 22.0]]))"
        )
        assert f"{result.status} {result.status:d}" == "NONE 0"
    assert repr(large.run(np.zeros((1, 600, 600), np.float32))) == "(output_0: float32[1, 600, 600])"
