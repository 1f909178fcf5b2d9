"""The drop-in for LiteRT's interpreter: its values, errors and details are the real module's own."""

import importlib.util
import inspect
import json
import multiprocessing
import subprocess
import sys
import threading
import types
from functools import partial

import numpy as np
import pytest
from dropin_nets import ran
from kills import kill
from lite_nets import convolution, counter, entries, memory, selection, spread
from tflite_writer import Writer

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert import interpreter as package

import driver.dropin.litert as dropin
from driver.devices.litert.interpreted import PACKAGES
from driver.dropin.device_model import DeviceModel, connections
from driver.dropin.hook import DEVICE

BOTH = package.Interpreter, dropin.Interpreter
RESOLVERS = list(package.OpResolverType)


def steps(interpreter, runs=3, between=None):
    """What a program sees: details before and after runs, and all outputs."""
    seen = [interpreter.get_input_details(), interpreter.get_output_details(), interpreter.get_tensor_details()]
    interpreter.allocate_tensors()
    for n in range(runs):
        for told in interpreter.get_input_details():
            interpreter.set_tensor(told["index"], (3 * spread(n, *told["shape"])).astype(told["dtype"]))
        interpreter.invoke()
        seen += [interpreter.get_tensor(told["index"]) for told in interpreter.get_output_details()]
        seen += [interpreter.get_output_details()]
        if between:
            between(interpreter)
    return [*seen, interpreter.get_tensor_details()]


def same(found, expected):
    """Equal, arrays by their bits."""
    if isinstance(expected, np.ndarray):
        return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(expected, dict):
        return [*found] == [*expected] and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


NETS = {"plain": convolution(), "cells": memory(), "variable": counter(), "sizes": selection()}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("resolver", RESOLVERS)
def test_values_and_details_are_those_in_process(counted, net, resolver):
    """All that a program sees, bit for bit and word for word, with each resolver."""
    given = {"model_content": NETS[net], "experimental_op_resolver_type": resolver}
    expected, found = (steps(kind(**given)) for kind in BOTH)
    assert same(found, expected)
    assert ran(counted) == (3, 0)


@pytest.mark.parametrize("threads", [None, 1, 2])
def test_a_file_and_threads(counted, tmp_path, threads):
    """By a path of either kind, given by position."""
    path = tmp_path / "net.tflite"
    path.write_bytes(convolution())
    expected, found = (steps(kind(p, None, None, threads)) for kind, p in zip(BOTH, (path, str(path)), strict=True))
    assert same(found, expected)
    assert counted()["models"] == [{"model": "net.tflite", "device": "litert", "sessions": 1, "device_runs": 3}]


@pytest.mark.parametrize("net", ["cells", "variable"])
def test_reset_all_variables(counted, net):
    """It does to variables what the real one does, whatever that is."""
    expected, found = (
        steps(kind(model_content=NETS[net]), between=lambda each: each.reset_all_variables()) for kind in BOTH
    )
    assert same(found, expected)


@pytest.mark.parametrize("net", ["cells", "variable"])
def test_variables_belong_to_the_interpreter(counted, net):
    """Two of one file in turn: each goes on where it was."""
    expected = steps(package.Interpreter(model_content=NETS[net]))
    first, second = (dropin.Interpreter(model_content=NETS[net]) for _ in range(2))
    found = [None, None]
    turns = [
        threading.Thread(target=lambda n=n, i=i: found.__setitem__(n, steps(i))) for n, i in ((0, first), (1, second))
    ]
    for turn in turns:
        turn.start()
    for turn in turns:
        turn.join()
    assert same(found, [expected, expected])


@pytest.mark.parametrize("net", NETS)
def test_a_device_that_is_killed(counted, net):
    """Between runs, each time: no error, and no run is lost or counted twice."""
    expected = steps(package.Interpreter(model_content=NETS[net]))
    found = steps(dropin.Interpreter(model_content=NETS[net]), between=lambda _: kill(connections.to("litert")))
    assert same(found, expected)
    assert ran(counted) == (3, 0)


def test_kills_at_any_moment(counted):
    """While runs follow each other, the device is killed three times: each run adds to the variable once."""
    interpreter, killed = dropin.Interpreter(model_content=counter()), threading.Event()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], np.ones(1, np.float32))
    interpreter.invoke()

    def kills():
        for _ in range(3):
            turn.clear()
            kill(connections.to("litert"))
            turn.wait()
        killed.set()

    turn, found = threading.Event(), [interpreter.get_tensor(made["index"])[0]]
    killer = threading.Thread(target=kills)
    killer.start()
    while not killed.is_set():
        interpreter.invoke()
        found.append(interpreter.get_tensor(made["index"])[0])
        turn.set()
    killer.join()
    assert found == [*range(11, 11 + len(found))]


def test_resizing(counted):
    """To other sizes and back, strictly and not; a size that has no memory yet is told as the real one tells it."""

    def program(kind):
        interpreter = kind(model_content=convolution(signature=(-1, 8, 8, 4)))
        (told,) = interpreter.get_input_details()
        seen = []
        for shape in [(2, 8, 8, 4), (1, 8, 8, 4), (2, 8, 8, 4), (3, 6, 8, 4)]:
            is_strict = shape[1] == 8
            interpreter.resize_tensor_input(told["index"], shape, strict=is_strict)
            seen.append(outcome(interpreter.invoke))
            interpreter.allocate_tensors()
            interpreter.set_tensor(told["index"], spread(1, *shape))
            interpreter.invoke()
            (made,) = interpreter.get_output_details()
            seen += [made, interpreter.get_tensor(made["index"])]
        seen.append(outcome(lambda: interpreter.resize_tensor_input(told["index"], (1, 9, 8, 4), strict=True)))
        return seen

    expected, found = map(program, BOTH)
    assert same(found, expected)
    assert ran(counted) == (4, 0)


def test_views_of_tensors(counted):
    """`tensor` gives memory to write to and to read from; while a program holds it, nothing runs."""

    def program(kind):
        interpreter = kind(model_content=convolution())
        interpreter.allocate_tensors()
        given, made = (told[0]["index"] for told in (interpreter.get_input_details(), interpreter.get_output_details()))
        views = interpreter.tensor(given), interpreter.tensor(made)
        views[0]()[...] = spread(4, 1, 8, 8, 4)
        interpreter.invoke()
        seen, held = [views[1]().copy()], views[1]()
        seen += [outcome(interpreter.invoke), outcome(interpreter.allocate_tensors), held.copy()]
        del held
        interpreter.invoke()
        return [*seen, views[1]().copy(), views[0]().copy()]

    expected, found = map(program, BOTH)
    assert same(found, expected)


def test_signatures(counted):
    """Their names and details, their runs in any order on one variable, and other sizes."""

    def program(kind):
        interpreter = kind(model_content=entries())
        seen = [interpreter.get_signature_list()]
        for n, key in enumerate(["add", "multiply", "scale", "multiply", "add"]):
            runner = interpreter.get_signature_runner(key)
            shape = (n, 4) if key == "scale" else (2,)
            seen += [runner(x=spread(n, *shape)), runner.get_input_details(), runner.get_output_details()]
        seen.append(outcome(lambda: interpreter.get_signature_runner("other")))
        return [*seen, outcome(lambda: interpreter.get_signature_runner("add")(y=1)), outcome(runner)]

    expected, found = map(program, BOTH)
    assert same(found, expected)
    assert ran(counted) == (5, 0)


def outcome(call):
    try:
        return "done", str(call())
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return type(error), str(error)


WRONG = {
    "no file": {"model_path": "/nowhere/net.tflite"},
    "no model": {},
    "both": {"model_path": "a", "model_content": b"b"},
    "damaged": {"model_content": convolution()[:200]},
    "text": {"model_content": b"this is no model of anything"},
    "threads": {"model_content": convolution(), "num_threads": 0},
    "threads of a kind": {"model_content": convolution(), "num_threads": "2"},
    "resolver": {"model_content": convolution(), "experimental_op_resolver_type": "best"},
    "argument": {"model_content": convolution(), "colour": 1},
    "content": {"model_content": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_making_one_are_the_real_ones(counted, name):
    """Class and words."""
    expected, found = (outcome(lambda kind=kind: kind(**WRONG[name])) for kind in BOTH)
    assert found == expected
    assert expected[0] != "done"


def gathering():
    w = Writer()
    place = w.input((1,), "int32")
    return w.file([w.operator("GATHER", [w.constant(np.ones((3, 2), np.float32)), place], (1, 2), Axis=0)])


def test_errors_of_use_are_the_real_ones(counted):
    """Class and words, of what is set, and of a run that fails; the interpreter goes on."""

    def program(kind):
        interpreter = kind(model_content=gathering())
        seen = [outcome(lambda: interpreter.get_tensor(2))]
        interpreter.allocate_tensors()
        (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
        for value in ([[1]], [1.5], np.int64([1]), "x", np.zeros(2, np.int32)):
            seen += [outcome(lambda value=value: interpreter.set_tensor(given["index"], value))]
        seen += [outcome(lambda: interpreter.set_tensor(99, 1)), outcome(lambda: interpreter.get_tensor(99))]
        for place in (7, 1):
            interpreter.set_tensor(given["index"], np.int32([place]))
            seen += [outcome(interpreter.invoke)]
        return [*seen, interpreter.get_tensor(made["index"])]

    expected, found = map(program, BOTH)
    assert same(found, expected)


@pytest.mark.filterwarnings("ignore:Warning. Enabling:UserWarning")
def test_tensors_in_between(counted):
    """With `experimental_preserve_all_tensors` they are there: it runs in the process, which is counted."""
    given = {"model_content": convolution(), "experimental_preserve_all_tensors": True}

    def program(kind):
        interpreter = kind(**given)
        seen = steps(interpreter)
        return [*seen, *(interpreter.get_tensor(told["index"]) for told in interpreter.get_tensor_details()[:5])]

    expected, found = map(program, BOTH)
    assert same(found, expected)
    assert ran(counted) == (0, 3)
    (row,) = counted()["in_process"]
    assert row["reason"] == "the program reads tensors in between"


def test_a_tensor_in_between_that_is_read_all_the_same(counted):
    """The interpreter runs in the process from then on; what it leaves behind there is what the real one leaves."""
    w = Writer()
    middle = w.operator("ATAN2", [w.input((1, 4)), w.random((1, 4))], (1, 4))
    data = w.file([w.operator("ATAN2", [middle, w.random((1, 4))], (1, 4))])

    def program(kind):
        interpreter, seen = kind(model_content=data), []
        interpreter.allocate_tensors()
        for n in range(3):
            interpreter.set_tensor(0, spread(n, 1, 4))
            interpreter.invoke()
            seen += [interpreter.get_tensor(middle), interpreter.tensor(middle)().copy(), interpreter.get_tensor(4)]
        return [*seen, interpreter.get_tensor_details()]

    expected, found = map(program, BOTH)
    assert same(found, expected)
    assert ran(counted) == (1, 2)
    assert [row["reason"] for row in counted()["in_process"]] == ["the program reads tensors in between"]


def test_custom_operators(counted):
    """They run in the process, with the real errors; an interpreter that is given none is as any other."""

    def program(module, registerers):
        interpreter = module.InterpreterWithCustomOps(registerers, model_content=convolution())
        assert isinstance(interpreter, module.Interpreter)
        return steps(interpreter)

    for registerers in ([], ["no_such_symbol"], [lambda _: None]):
        expected, found = (outcome(partial(program, module, registerers)) for module in (package, dropin))
        assert found == expected
    assert ran(counted) == (3, 3)
    assert {row["reason"] for row in counted()["in_process"]} == {"it has custom operators of the program's own"}


def test_outputs_that_nothing_makes(counted):
    """A constant, and an input that is an output."""
    w = Writer()
    x, kept = w.input((2,)), w.constant(np.float32([1, 2]))
    data = w.file([w.operator("ADD", [x, kept], (2,)), x, kept])
    expected, found = (steps(kind(model_content=data)) for kind in BOTH)
    assert same(found, expected)


def test_no_elements(counted):
    """A batch of none."""

    def program(kind):
        interpreter = kind(model_content=entries())
        return interpreter.get_signature_runner("scale")(x=np.zeros((0, 4), np.float32))

    expected, found = (outcome(lambda kind=kind: program(kind)) for kind in BOTH)
    assert found == expected


def test_a_device_that_does_not_start(counted, monkeypatch, capsys):
    """The program runs as without it, with one line on standard error."""
    monkeypatch.setenv(DEVICE, "nothing_of_that_name")
    for data in NETS.values():
        expected, found = (steps(kind(model_content=data)) for kind in BOTH)
        assert same(found, expected)
    assert ran(counted) == (0, 3 * len(NETS))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("burst exec")]
    assert len(lines) == len(NETS)
    assert "runs in this process from now on" in lines[0]


def test_an_error_of_ours_costs_the_program_nothing(counted, monkeypatch, capsys):
    """Whatever it is: the runs of that interpreter are in the program, which is told."""

    def faulty(*_):
        raise KeyError("a fault")

    monkeypatch.setattr(DeviceModel, "run", faulty)
    expected, found = (steps(kind(model_content=convolution())) for kind in BOTH)
    assert same(found, expected)
    assert ran(counted) == (0, 3)
    assert "a fault" in capsys.readouterr().err


def test_a_model_that_the_device_cannot_prepare(counted, monkeypatch):
    """It is tried once, and not at every run: the device lacks the package whose interpreter was asked for."""
    if importlib.util.find_spec("tensorflow"):
        pytest.skip("the device has TensorFlow")
    monkeypatch.setattr(package, "__name__", PACKAGES[2])
    asked, prepare = [], DeviceModel.prepare
    monkeypatch.setattr(DeviceModel, "prepare", lambda model: asked.append(model) or prepare(model))
    expected, found = (steps(kind(model_content=convolution())) for kind in BOTH)
    assert same(found, expected)
    assert (ran(counted), len(asked)) == ((0, 3), 1)
    (row,) = counted()["in_process"]
    assert row["reason"].startswith("the device did not prepare it: ")
    assert "tensorflow" in row["reason"]


def test_in_a_forked_child(counted):
    """It goes on there with the variables as they were, and so does the parent."""
    own, ours = (kind(model_content=counter()) for kind in BOTH)
    for each in (own, ours):
        steps(each, 2)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()
    child = fork.Process(target=lambda: sender.send(same(program_after(ours), program_after(own))))
    child.start()
    assert receiver.recv()
    child.join()
    assert same(program_after(ours), program_after(own))


def program_after(interpreter, *, is_new=False):
    if is_new:
        interpreter.allocate_tensors()
    interpreter.invoke()
    return [interpreter.get_tensor(told["index"]) for told in interpreter.get_output_details()]


def test_it_is_a_subclass_with_the_real_names(counted):
    """Programs subclass it, and ask what it is; all other names of the module are the real ones."""
    assert issubclass(dropin.Interpreter, package.Interpreter)
    assert dropin.Interpreter.__name__ == "Interpreter"
    assert {name for name, _ in inspect.getmembers(package.Interpreter)} <= {*dir(dropin.Interpreter)}
    for name in dir(package):
        if not name.startswith(("Interpreter", "__")):
            assert getattr(dropin, name) is getattr(package, name)

    class Own(dropin.Interpreter):
        def __init__(self):
            super().__init__(model_content=memory())
            self.allocate_tensors()

    assert isinstance(Own(), package.Interpreter)
    program_after(Own())
    assert ran(counted) == (1, 0)


PROGRAM = """
import sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter
import ai_edge_litert.interpreter as package
interpreter = package.Interpreter(model_path=sys.argv[1])
assert isinstance(interpreter, Interpreter)
interpreter.allocate_tensors()
for n in range(3):
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.float32([n]))
    interpreter.invoke()
    print(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]))
"""


@pytest.mark.integration
def test_a_program_that_nobody_changes(home, tmp_path):
    """`burst exec` has its interpreter in a device, and the report says so."""
    path, report = tmp_path / "counter.tflite", tmp_path / "report.json"
    path.write_bytes(counter())
    program = [sys.executable, "-c", PROGRAM, str(path)]
    command = [sys.executable, "-m", "burst_engine", "exec", "--report", str(report), "--", *program]
    ended = [subprocess.run(c, capture_output=True, text=True, check=True, timeout=300) for c in (program, command)]
    assert ended[0].stdout == ended[1].stdout == "[10.]\n[11.]\n[13.]\n"
    (process,) = json.loads(report.read_text())["processes"]
    assert process["models"] == [{"model": "counter.tflite", "device": "litert", "sessions": 1, "device_runs": 3}]


def test_where_the_classes_are_replaced(counted):
    """In a package as it is when it has been loaded; the drop-in's own import finds that it is done."""
    copy = types.ModuleType(package.__name__)
    vars(copy).update(vars(package))
    dropin.replace(copy)
    assert copy.Interpreter is not package.Interpreter
    assert issubclass(copy.Interpreter, package.Interpreter)
    assert dropin.in_device(copy, copy.Interpreter) is copy.Interpreter
    program_after(copy.Interpreter(model_content=memory()), is_new=True)
    assert ran(counted) == (1, 0)


def test_a_file_that_has_gone(counted, tmp_path):
    """An interpreter keeps the file that it was made of: it tells details, and the program reads tensors in between."""

    def program(kind):
        path = tmp_path / "net.tflite"
        path.write_bytes(convolution())
        interpreter = kind(str(path))
        path.unlink()
        seen = steps(interpreter)
        return [*seen, *(interpreter.get_tensor(told["index"]) for told in interpreter.get_input_details())]

    expected, found = map(program, BOTH)
    assert same(found, expected)


def test_a_subclass_has_any_attributes(counted):
    """A program's own names are none of ours."""

    def program(kind):
        class Named(kind):
            def __init__(self, data):
                super().__init__(model_content=data)
                self._asked, self._name = "mine", 3

        named = Named(convolution())
        return [*steps(named), named._asked, named._name]

    expected, found = map(program, BOTH)
    assert same(found, expected)
    assert [row["model"] for row in counted()["models"]] == [f"a model of {len(convolution())} bytes"]
