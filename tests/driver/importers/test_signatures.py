"""Files with several entries: each is loaded by its name, and gives what LiteRT's own runner of it gives."""

import pickle

import numpy as np
import pytest
from tflite_writer import Writer

import driver
from driver.client.stream_plan import StreamPlan
from driver.importers.tflite import header


def several():
    """Three signatures in three subgraphs, in another order than the subgraphs."""
    w = Writer()
    x = w.input((1, 4))
    y = w.operator("ADD", [x, w.constant(np.full(4, 10, np.float32))], (1, 4))
    encode, decode = w.graph(), w.graph()
    a, b = encode.input((2, 3)), encode.input((2, 3))
    encode.outputs = [encode.operator("SUB", [a, b], (2, 3)), encode.operator("MUL", [a, b], (2, 3))]
    z = decode.input((5,))
    decode.outputs = [decode.operator("NEG", [z], (5,))]
    named = dict(zip(("difference", "product"), encode.outputs, strict=True))
    signatures = [
        ("encode", 1, {"p": a, "q": b}, named),
        ("first", 0, {"x": x}, {"y": y}),
        ("decode", 2, {"z": z}, {"out": decode.outputs[0]}),
    ]
    return w.file([y], signatures=signatures)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "several.tflite").write_bytes(several())
    return tmp_path / "several.tflite"


@pytest.mark.parametrize("name", [None, "first", "encode", "decode"])
def test_each_signature_is_a_model(path, home, name):
    """By its own names of inputs and outputs, in file form on LiteRT and as operations, with LiteRT's own values."""
    interpreter = pytest.importorskip("ai_edge_litert.interpreter", reason="no LiteRT")
    runner = interpreter.Interpreter(model_path=str(path)).get_signature_runner(name or "first")
    model = driver.load(path, signature=name)
    assert model.signatures[0] == (name or "first")
    assert {*model.signatures} == {"encode", "first", "decode"}
    feeds = {t.name: np.random.default_rng(1).standard_normal(t.shape).astype(t.dtype) for t in model.inputs}
    wanted = runner(**feeds)
    for device in ("litert", "reference"):
        with driver.compile(model, [device]) as compiled:
            found = compiled.run(feeds)
            assert {*found.names} == {*wanted}
            assert all(np.array_equal(found[key], array) for key, array in wanted.items())


def test_an_unknown_signature(path, tmp_path):
    """The message names those that there are; files that have none say so, too."""
    with pytest.raises(driver.ImportFailed, match=r"no signature 'encoed'; choose from encode, first, decode; did you"):
        driver.load(path, signature="encoed")
    w = Writer()
    (tmp_path / "one.tflite").write_bytes(w.file([w.operator("NEG", [w.input((2,))], (2,))]))
    with pytest.raises(driver.ImportFailed, match=r"no signature 'x'; it has none: leave it out"):
        driver.load(tmp_path / "one.tflite", signature="x")


def test_the_check_lists_them(path, home):
    """With the inputs and outputs of each."""
    report = driver.check(path)
    assert report.offers == (
        "signature encode: p: float32 [2, 3], q: float32 [2, 3] -> difference: float32 [2, 3], product: float32 [2, 3]",
        "signature decode: z: float32 [5] -> out: float32 [5]",
    )
    assert all(line in str(report) for line in report.offers)
    other = driver.check(path, {"z": (5,)}, signature="decode")
    assert other.ok
    assert [line.partition(":")[0] for line in other.offers] == ["signature first", "signature encode"]
    unknown = driver.check(path, signature="encoed")
    assert not unknown.ok
    assert "choose from encode, first, decode" in str(unknown)


def test_damaged_files():
    """Whatever stands in the lists of signatures and subgraphs, it is refused, or changed within the file."""
    data, random = several(), np.random.default_rng(1)
    for _ in range(500):
        damaged = bytearray(data)
        for at in random.integers(8, len(data), 3):
            damaged[at] = random.integers(256)
        try:
            changes = header.as_first(memoryview(damaged), "decode")
        except driver.ImportFailed:
            continue
        assert all(0 <= at <= len(data) - len(new) for at, new in changes)


# ---- names that a runtime has besides


def named_tflite():
    """x and y of a signature, whose tensors LiteRT calls as TensorFlow does; z is of no other name."""
    w = Writer()
    x, z = w.input((2, 3), name="serving_default_x:0"), w.input((2, 3), name="z")
    y = w.operator("SUB", [x, z], (2, 3))
    w.tensors[y]["name"] = "StatefulPartitionedCall:0"
    return w.file([y], ({"x": x, "z": z}, {"y": y}))


def test_one_output_by_two_names(tmp_path):
    """A stream feeds it back once: its values lie in one place, and the other input would get none."""
    path = tmp_path / "named.tflite"
    path.write_bytes(named_tflite())
    twice = {"y": "x", "StatefulPartitionedCall:0": "z"}
    with pytest.raises(ValueError, match="fed back already, by its other name"):
        StreamPlan.of(driver.load(path), twice, until=None, most=1, also=())


@pytest.mark.parametrize("form", ["auto", "operations"])
def test_tensors_by_the_names_of_the_runtime(tmp_path, device, form):
    """Each is taken for its name in the signature: in run, in bursts, in results, and where shapes are given."""
    path = tmp_path / "named.tflite"
    path.write_bytes(named_tflite())
    model = driver.load(path, {"serving_default_x:0": (2, 3)}, form)
    a, b = np.float32([[1, 2, 3]] * 2), np.float32([[3, 2, 1]] * 2)
    with device.prepare(model.form_for(())) as prepared:
        for feeds in ({"x": a, "z": b}, {"serving_default_x:0": a, "z": b}):
            found = prepared.run(feeds)
            assert found.keys() == ("y",)
            assert "StatefulPartitionedCall:0" in found
            for name in ("y", "StatefulPartitionedCall:0"):
                assert np.array_equal(found[name], a - b)
        with prepared.burst() as burst:
            burst.inputs["serving_default_x:0"][...] = b
            assert np.array_equal(
                burst.run(**{"z": b, "serving_default_x:0": a}).outputs["StatefulPartitionedCall:0"], a - b
            )
        copy = pickle.loads(pickle.dumps(found))
        assert np.array_equal(copy["StatefulPartitionedCall:0"], a - b)
        with pytest.raises(ValueError, match=r"input 'x' is given twice, also as 'serving_default_x:0'"):
            prepared.run({"x": a, "serving_default_x:0": a, "z": b})
        with pytest.raises(ValueError, match=r"there is no input 'serving_default_z:0'; the model takes x, z"):
            prepared.run({"x": a, "serving_default_z:0": b})
