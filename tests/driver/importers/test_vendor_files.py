"""Files out of the vendor's own converter (make_tflite.py): found by name, computed, equal to the library's results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.devices import device_class
from driver.nn import Interpreter, OperandLifeTime, OperandType
from driver.runtime import capabilities, compilation

litert = pytest.importorskip("ai_edge_litert.interpreter", reason="needs the extra 'litert'")
WITHOUT_XNNPACK = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES

FOLDER = Path(__file__).parent / "vendor"
NAMES = sorted(file.stem for file in FOLDER.glob("*.tflite"))
REFUSED = {"lstm_int8": ("UNIDIRECTIONAL_SEQUENCE_LSTM", 3, "INT16")}
IMPORTED = [name for name in NAMES if name not in REFUSED]
WHOLE = ("batches", "condition", "gru", "loop")
"""Most of what they do is control flow, or a shape that is known when the file is read: no layers."""
LAYERED = [name for name in IMPORTED if not name.endswith("dynamic") and name.split("_")[0] not in WHOLE]
ELSEWHERE = {"detector": ["GATHER"]}
"""What litert has not, by net: indices that are an output, too, which the client may write."""


def net(name):
    """The operations of a file."""
    return driver.load(FOLDER / f"{name}.tflite", form="operations")


def feeds(name):
    """Random inputs by their names, in the scale of those that are quantised."""
    random, found = np.random.default_rng(20), {}
    for key, detail in interpreter(name).get_signature_runner().get_input_details().items():
        shape, dtype, (scale, zero_point) = detail["shape"], np.dtype(detail["dtype"]), detail["quantization"]
        values = random.normal(0, 1, shape)
        if dtype.itemsize == 1 and dtype.kind in "iu":
            values = (values / scale + zero_point).round().clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
        elif dtype.kind in "ib":
            values = random.integers(1, 8, shape)
        found[key] = np.asarray(values, dtype)
    return found


def interpreter(name, **more):
    """The library's own."""
    return litert.Interpreter(str(FOLDER / f"{name}.tflite"), num_threads=1, **more)


def library(name, arrays, **more):
    """What the library makes of named inputs, by the names of the outputs."""
    found = interpreter(name, **more).get_signature_runner()(**arrays)
    return {key: np.atleast_1d(array) for key, array in found.items()}


def in_order(model, arrays):
    """Named inputs as the model lists them; states begin as zeros."""
    operands = [model.main.operands[i] for i in model.main.inputs]
    states = {o.extra["name"]: np.zeros(o.dimensions, o.type.dtype) for o in operands if "state" in o.extra}
    return [np.atleast_1d((states | arrays)[o.extra["name"]]).astype(o.type.dtype) for o in operands]


def by_name(model, results):
    """Outputs by their names, without the states."""
    named = zip((model.main.operands[i].extra for i in model.main.outputs), results, strict=True)
    return {extra["name"]: array for extra, array in named if "state" not in extra}


def reference(model, arrays):
    """What the definition says."""
    bound = Interpreter(model).bind(in_order(model, arrays))
    bound.run()
    return by_name(model, [np.array(tensor.data) for tensor in bound.results])


def distance(ours, theirs):
    """The largest difference of two results."""
    return max(float(np.abs(ours[key].astype(float) - theirs[key].astype(float)).max()) for key in theirs)


def tolerance(name, arrays, theirs):
    """How far a result may be from the library's.

    float32, float16 weights: the order of sums. Quantised: a step of an inner layer can be many of a finer layer
    behind it; so as far as the library's own two sets of kernels are apart, and one. Dynamic range: the library also
    rounds what goes into a layer to 8 bits, which takes it as far from the float32 net as we may be from it.
    """
    if name.endswith("dynamic"):
        return 1.5 * distance(theirs, library(name.replace("dynamic", "float32"), arrays))
    if name.endswith("int8"):
        return 1 + distance(theirs, library(name, arrays, experimental_op_resolver_type=WITHOUT_XNNPACK))
    return 4e-6 * max(1.0, *(float(np.abs(array).max()) for array in theirs.values()))


def agree(name, model, ours, arrays):
    """The same names, shapes and values, as far as the library agrees with itself."""
    theirs = library(name, arrays)
    assert {k: a.shape for k, a in ours.items()} == {k: a.shape for k, a in theirs.items()}
    assert distance(ours, theirs) <= tolerance(name, arrays, theirs)


@pytest.mark.parametrize("name", IMPORTED)
def test_the_reference_computes_what_the_library_does(name):
    """Inputs and outputs are found by the names of the signature."""
    model, arrays = net(name), feeds(name)
    agree(name, model, reference(model, arrays), arrays)


@pytest.fixture
def settled(shared, monkeypatch):
    """litert is faster than the CPU at everything: figures say so, and nobody measures the plans."""
    shared.enter(monkeypatch)
    figure = driver.Performance(0.5, None)
    figures = driver.Capabilities(
        dict.fromkeys(OperandType.__members__, figure), figure, figure, figure, figure, source="measured"
    )
    monkeypatch.setattr(compilation, "can_be_measured", lambda model: False)
    capabilities.store("litert", device_class("litert").version, figures)


@pytest.mark.integration
@pytest.mark.parametrize("name", IMPORTED)
def test_compiled_it_runs_on_litert_but_for_what_that_has_not(name, settled):
    """The placement says so, and the values are the library's; nothing falls back while it runs."""
    model, arrays = net(name), feeds(name)
    with driver.compile(model, ["litert", "cpu"]) as compiled:
        on_cpu = [i for device, operations in compiled.placement() if device == "cpu" for i in operations]
        results = compiled.run(*in_order(model, arrays))
        fallbacks = compiled.stats()["fallbacks"]
    assert [model.main.operations[i].type for i in on_cpu] == ELSEWHERE.get(name.split("_")[0], [])
    assert not any(fallbacks[kind] for kind in ("dropped", "compile", "step", "whole"))
    agree(name, model, by_name(model, results), arrays)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name):
    """The operator, its index and the reason."""
    operator, index, reason = REFUSED[name]
    with pytest.raises(driver.ImportFailed, match=reason) as caught:
        net(name)
    assert (caught.value.operator, caught.value.index) == (operator, index)


def tensors(name, arrays):
    """Every tensor of a run of the library, by name, but for those that share one."""
    runner = interpreter(name, experimental_preserve_all_tensors=True, experimental_op_resolver_type=WITHOUT_XNNPACK)
    runner.allocate_tensors()
    places = {k: d["index"] for k, d in runner.get_signature_runner().get_input_details().items()}
    for key, place in places.items():
        runner.set_tensor(place, arrays[key])
    runner.invoke()
    details = runner.get_tensor_details()
    names = [detail["name"] for detail in details]
    return {d["name"]: runner.get_tensor(d["index"]) for d in details if d["name"] and names.count(d["name"]) == 1}


def tensor_name(operand):
    """What a tensor is called in the file; None for operands that are not in it."""
    return operand.extra.get("tensor", operand.extra["name"]) if operand.extra else None


def needed(graph, output, is_known):
    """The operations that make operand `output` from operands that are known, in their order."""
    makers = {i: number for number, operation in enumerate(graph.operations) for i in operation.outputs}
    wanted, found = [output], set()
    while wanted:
        number = makers[wanted.pop()]
        if number not in found:
            found.add(number)
            wanted += [i for i in graph.operations[number].inputs if not is_known(i)]
    return [graph.operations[number] for number in sorted(found)]


def layer(graph, output, known):
    """A model of those operations alone, and the operands that are its inputs."""
    free = OperandLifeTime.NO_VALUE
    fixed = {i for i, o in enumerate(graph.operands) if o.lifetime.is_constant or o.lifetime == free}
    given = {i for i, o in enumerate(graph.operands) if tensor_name(o) in known or "state" in (o.extra or {})} - fixed
    operations = needed(graph, output, (fixed | given).__contains__)
    written = [i for operation in operations for i in operation.outputs]
    inputs = sorted({i for operation in operations for i in operation.inputs if i in given} - set(written))
    used = sorted({i for operation in operations for i in (*operation.inputs, *operation.outputs)})
    roles = dict.fromkeys(written, OperandLifeTime.TEMPORARY_VARIABLE) | {output: OperandLifeTime.SUBGRAPH_OUTPUT}
    roles |= dict.fromkeys(inputs, OperandLifeTime.SUBGRAPH_INPUT)
    operands = [replace(graph.operands[i], lifetime=roles.get(i, graph.operands[i].lifetime)) for i in used]
    place = {i: number for number, i in enumerate(used)}
    moved = [replace(o, inputs=[place[i] for i in o.inputs], outputs=[place[i] for i in o.outputs]) for o in operations]
    subgraph = driver.Subgraph(operands, moved, [place[i] for i in inputs], [place[output]])
    return driver.Model(subgraph), [graph.operands[i] for i in inputs]


def given(operand, known):
    """The library's value for an input of a layer."""
    if "state" in operand.extra:
        return np.zeros(operand.dimensions, operand.type.dtype)
    return np.atleast_1d(known[tensor_name(operand)]).astype(operand.type.dtype)


@pytest.mark.filterwarnings("ignore:Warning. Enabling `experimental_preserve_all_tensors`")
@pytest.mark.parametrize("name", LAYERED)
def test_each_layer_is_the_librarys(name):
    """Given the library's own values, each layer's result is within a step of its own, or the last bits of a sum."""
    graph, known = net(name).main, tensors(name, feeds(name))
    written = [i for operation in graph.operations for i in operation.outputs]
    layers = [i for i in written if tensor_name(graph.operands[i]) in known and "state" not in graph.operands[i].extra]
    operators = [o["op_name"] for o in interpreter(name)._get_ops_details()]
    assert len(layers) >= 0.8 * len([o for o in operators if o != "DEQUANTIZE"])
    for i in layers:
        model, operands = layer(graph, i, known)
        bound = Interpreter(model).bind([given(o, known) for o in operands])
        bound.run()
        ours, theirs = np.array(bound.results[0].data), np.atleast_1d(known[tensor_name(graph.operands[i])])
        most = 1.0 if graph.operands[i].type.is_quantised else 4e-6 * max(1.0, float(np.abs(theirs).max()))
        assert distance({"": ours}, {"": theirs}) <= most, f"{name}: {tensor_name(graph.operands[i])}"
