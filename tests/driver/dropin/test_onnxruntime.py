"""The drop-in for onnxruntime's Python API: its values, errors and names are the real module's own."""

import faulthandler
import inspect
import os
import pickle
import re
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as real
import packed_nets
import pytest
from dropin_nets import CPU, bits, endless, feed, helper, layers, ran, saved, tensor
from kills import kill
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import driver.dropin.onnxruntime as ort
from burst import MissedDeadlineTransient
from driver.dropin.device_model import DeviceModel, connections

IN_PROCESS_ALONE = {
    # What the real class has, and what of ours is the real class's own code on a session of this process.
    *("create_ortvalue_from_shape_and_type", "end_profiling", "get_profiling_start_time_ns"),
    *("get_provider_graph_assignment_info", "get_tuning_results", "release_captured_graph"),
    *("run_with_ortvaluevector", "set_ep_dynamic_options", "set_tuning_results"),
}
OF_THE_BARE_SESSION = {
    # What the real class tells from what it keeps, which is the same for a session whose weights are not there.
    *("disable_fallback", "enable_fallback", "get_input_epdevices", "get_input_memory_infos", "get_inputs"),
    *(
        "get_modelmeta",
        "get_output_memory_infos",
        "get_outputs",
        "get_overridable_initializers",
        "get_provider_options",
    ),
    *("get_providers", "get_session_options"),
}
OURS = {"io_binding", "run", "run_async", "run_with_iobinding", "run_with_ort_values", "set_providers"}


def test_every_public_name_of_the_session_is_accounted_for():
    """The real class's methods are ours, or run unchanged on what we keep, or on a session of this process; ours has no
    others.
    """
    names = {name for name, _ in inspect.getmembers(real.InferenceSession) if not name.startswith("_")}
    assert names <= IN_PROCESS_ALONE | OF_THE_BARE_SESSION | OURS
    ours = {name for name, _ in inspect.getmembers(ort.InferenceSession) if not name.startswith("_")}
    assert ours == names
    assert {name for name in vars(ort.InferenceSession) if not name.startswith("_")} == OURS


def test_the_module_has_every_public_name():
    """Those that are not ours are the real ones."""
    for name in dir(real):
        if not name.startswith("__"):
            assert hasattr(ort, name)
    assert ort.get_available_providers is real.get_available_providers
    assert issubclass(ort.InferenceSession, real.InferenceSession)
    assert issubclass(ort.SessionOptions, real.SessionOptions)


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_values_and_descriptions_are_those_in_process(counted, net, kind):
    """Outputs bit for bit, all or some, in the caller's own arrays; inputs, outputs and metadata word for word."""
    source = net if kind == "path" else Path(net).read_bytes()
    own, ours = real.InferenceSession(source, providers=CPU), ort.InferenceSession(source, providers=CPU)
    for rows in (3, 1, 7, 3):
        expected, found = own.run(None, feed(rows)), ours.run(None, feed(rows))
        assert bits(found) == bits(expected)
        assert all(array.flags.writeable and array.flags.owndata for array in found)
    assert bits(ours.run(["total", "y"], feed())) == bits(own.run(["total", "y"], feed()))
    for about in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        its = [[(n.name, n.type, n.shape) for n in getattr(session, about)()] for session in (own, ours)]
        assert its[0] == its[1]
    for name in ("producer_name", "graph_name", "domain", "version", "custom_metadata_map"):
        assert getattr(ours.get_modelmeta(), name) == getattr(own.get_modelmeta(), name)
    assert ours.get_providers() == own.get_providers()
    assert ran(counted) == (5, 0)


@pytest.mark.parametrize("name", sorted(packed_nets.NETS))
def test_texts_sequences_and_maps(counted, name, tmp_path):
    """Whatever is no tensor of numbers is what the real session gives, wherever it ran."""
    _, values = packed_nets.NETS[name]
    source = str(packed_nets.write_net(name, tmp_path))
    own, ours = (module.InferenceSession(source, providers=CPU) for module in (real, ort))
    given = dict(zip([i.name for i in own.get_inputs()], values, strict=True))
    expected, found = own.run(None, given), ours.run(None, given)
    assert list(map(type, found)) == list(map(type, expected))
    np.testing.assert_equal(found, expected)


BAD_FEEDS = {
    "none": {},
    "name": {**feed(), "other": np.zeros(1, np.float32)},
    "type": {"x": np.zeros((1, 64))},
    "rank": {"x": np.zeros(64, np.float32)},
    "size": {"x": np.zeros((1, 63), np.float32)},
    "list": {"x": [[0.0] * 64]},
    "nothing": None,
    "pairs": [("x", feed()["x"])],
}


@pytest.mark.parametrize("name", BAD_FEEDS)
def test_errors_of_a_run_are_the_real_ones(counted, net, name):
    """Class and words; the session goes on."""
    own, ours = (module.InferenceSession(net, providers=CPU) for module in (real, ort))

    def outcome(session):
        try:
            return bits(session.run(None, BAD_FEEDS[name]))
        except Exception as error:  # noqa: BLE001 (compared)
            return type(error), str(error)

    assert outcome(ours) == outcome(own)
    assert bits(ours.run(None, feed())) == bits(own.run(None, feed()))
    assert ran(counted)[0] >= 1


@pytest.mark.parametrize("source", [b"", b"hello", "/nowhere.onnx", b"\x08\x08:\x00", 3])
def test_errors_of_a_file_are_the_real_ones(counted, source):
    """A file that is none has the error that it has without us."""
    errors = []
    for module in (real, ort):
        with pytest.raises(Exception) as found:  # noqa: PT011 (compared)
            module.InferenceSession(source, providers=CPU)
        errors.append((found.type, str(found.value)))
    assert errors[0] == errors[1]


def test_options_reach_the_device(counted, net):
    """Optimisation level, threads and sizes of open dimensions; what the device does not do runs in this process."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    for key in ("mlas.disable_kleidiai", "session.disable_prepacking", "session.allow_released_opsets_only"):
        options.add_session_config_entry(key, "1")
    options.add_free_dimension_override_by_name("n", 2)
    session = ort.InferenceSession(net, options, providers=CPU)
    assert session.get_inputs()[0].shape == [2, 64]
    assert session.get_session_options().intra_op_num_threads == 1
    own = real.SessionOptions()
    own.graph_optimization_level = real.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert bits(session.run(None, feed(2))) == bits(real.InferenceSession(net, own, providers=CPU).run(None, feed(2)))
    assert ran(counted) == (1, 0)


def refused(change):
    options = ort.SessionOptions()
    change(options)
    return options


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: setattr(o, "enable_profiling", True), "profiled"),
        (lambda o: o.add_session_config_entry("session.set_denormal_as_zero", "1"), "set_denormal_as_zero"),
        (lambda o: o.add_initializer("b", real.OrtValue.ortvalue_from_numpy(np.ones((64, 64), np.float32))), "weights"),
    ],
)
def test_what_the_device_does_not_do_is_done_here_and_counted(counted, net, change, reason, tmp_path, monkeypatch):
    """By the real class, with the reason."""
    monkeypatch.chdir(tmp_path)  # where a profile is written
    session = ort.InferenceSession(net, refused(change), providers=CPU)
    assert len(session.run(None, feed())) == 2
    assert ran(counted) == (0, 1)
    assert reason in counted()["in_process"][0]["reason"]


def test_options_that_the_file_has_are_taken_here(counted, net, monkeypatch):
    """Where ONNX Runtime's variable asks for it."""
    model = onnx.load(net)
    helper.set_model_props(model, {"ort_config": '{"session_options": {"inter_op_num_threads": 5}}'})
    onnx.save(model, net)
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    session = ort.InferenceSession(net, providers=CPU)
    assert session.get_session_options().inter_op_num_threads == 5
    assert len(session.run(None, feed())) == 2
    assert ran(counted) == (0, 1)
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "0")
    ort.InferenceSession(net, providers=CPU).run(None, feed())
    assert ran(counted) == (1, 1)


def test_a_run_in_the_background(counted, net):
    """The callback gets outputs and what the program gave, or the fault."""
    session, expected = ort.InferenceSession(net, providers=CPU), real.InferenceSession(net).run(None, feed())
    there, found = threading.Event(), []

    def back(*given):
        found.append(given)
        there.set()

    session.run_async(None, feed(), back, "mine")
    assert there.wait(60)
    assert bits(found[0][0]) == bits(expected)
    assert found[0][1:] == ("mine", "")
    there.clear()
    session.run_async(["nothing"], feed(), back, None)
    assert there.wait(60)
    assert "Invalid output name:nothing" in found[1][2]
    with pytest.raises(ValueError, match="are missing from input feed"):
        session.run_async(None, {}, back, None)


@pytest.mark.integration
def test_a_run_is_terminated(counted, tmp_path, monkeypatch):
    """Before it, or by another thread while it runs: the real error, before the device ends the loop by its limit, and
    the session runs again.
    """
    runs, watch = [], ort.RunOptions.watch
    monkeypatch.setattr(ort.RunOptions, "watch", lambda options, run: (runs.append(run), watch(options, run)))
    path = endless(tmp_path / "loop.onnx")
    given, short = ({"x": np.ones(1, np.float32), "n": np.array(n)} for n in (2**62, 3))
    errors = []
    for module in (real, ort):
        session, options = module.InferenceSession(path, providers=CPU), module.RunOptions()
        options.terminate = True
        with pytest.raises(Exception) as found:  # noqa: PT011 (compared)
            session.run(None, given, options)
        errors.append((found.type, "Exiting due to terminate flag being set to true" in str(found.value)))
        options.terminate = False
        there = threading.Timer(0.2, lambda options=options: setattr(options, "terminate", True))
        there.start()
        with pytest.raises(Exception) as found:  # noqa: PT011 (compared)
            session.run(None, given, options)
        there.join()
        errors.append((found.type, "Exiting due to terminate flag being set to true" in str(found.value)))
        assert session.run(None, short, module.RunOptions())[0].shape == (1,)
    assert errors == [(Fail, True)] * 4
    assert [run.future.late_status for run in runs] == [None] * 2  # the device has not answered the first


def test_a_loop_that_a_device_does_not_wait_for_runs_here(counted, net, monkeypatch):
    """Devices end loops after some seconds: the real session repeats the run, and does those after it."""
    session = ort.InferenceSession(net, providers=CPU)
    expected = bits(session.run(None, feed()))

    def overdue(*_):
        raise MissedDeadlineTransient("the loop is not done")

    with monkeypatch.context() as patched:
        patched.setattr(DeviceModel, "run", overdue)
        assert bits(session.run(None, feed())) == expected
    assert bits(session.run(None, feed())) == expected
    assert ran(counted) == (1, 2)
    assert "loop" in counted()["in_process"][0]["reason"]


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_an_error_of_ours_costs_the_program_nothing(counted, net, monkeypatch, where, capsys):
    """Whatever it is: the session runs in the program, which is told, and others are in the device."""
    expected, make = bits(real.InferenceSession(net, providers=CPU).run(None, feed())), ort.InferenceSession

    def faulty(*_):
        raise KeyError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(DeviceModel, where, faulty)
        session = make(net, providers=CPU)
        assert bits(session.run(None, feed())) == expected
    assert bits(session.run(None, feed())) == expected
    assert ran(counted) == (0, 2)
    assert "a fault" in counted()["in_process"][0]["reason"]
    assert "a fault" in capsys.readouterr().err
    assert bits(make(net, providers=CPU).run(None, feed())) == expected
    assert ran(counted) == (1, 2)


def values(module, session, x):
    """By OrtValues."""
    return session.run_with_ort_values(["total", "y"], {"x": module.OrtValue.ortvalue_from_numpy(x)})


def bound(module, session, x):
    """Inputs and outputs of all kinds of memory: an array's, a value's, an address, and ONNX Runtime's own."""
    y, total = np.empty((len(x), 64), np.float32), module.OrtValue.ortvalue_from_shape_and_type((), np.float32)
    one, two = session.io_binding(), session.io_binding()
    one.bind_cpu_input("x", x)
    one.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    one.bind_ortvalue_output("total", total)
    session.run_with_iobinding(one)
    two.bind_ortvalue_input("x", module.OrtValue.ortvalue_from_numpy(x))
    two.bind_output("total")
    two.bind_output("y", "cpu")
    session.run_with_iobinding(two)
    held = two.get_outputs()
    three = session.io_binding()
    three.bind_input("x", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    three.bind_output("y")
    session.run_with_iobinding(three)
    return [y, total, *one.get_outputs(), *held, *three.copy_outputs_to_cpu(), *two.copy_outputs_to_cpu()]


def plain(found):
    return bits([each if isinstance(each, np.ndarray) else each.numpy() for each in found])


@pytest.mark.parametrize("way", [values, bound])
def test_values_and_bindings(counted, net, way):
    """In the device, to and from the program's memory: equal bits."""
    own, ours = real.InferenceSession(net, providers=CPU), ort.InferenceSession(net, providers=CPU)
    for rows in (2, 5):
        assert plain(way(ort, ours, feed(rows)["x"])) == plain(way(real, own, feed(rows)["x"]))
    assert ran(counted)[1] == 0


def wrong_name(session, binding, x):
    binding.bind_cpu_input("z", x)


def wrong_output(session, binding, x):
    binding.bind_cpu_input("x", x)
    binding.bind_output("z")
    session.run_with_iobinding(binding)


def wrong_type(session, binding, x):
    binding.bind_cpu_input("x", x.astype(np.float64))
    binding.bind_output("y")
    session.run_with_iobinding(binding)


def no_input(session, binding, x):
    binding.bind_output("y")
    session.run_with_iobinding(binding)


def small_memory(session, binding, x):
    binding.bind_cpu_input("x", x)
    y = np.empty((1, 64), np.float32)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)


@pytest.mark.parametrize("fault", [wrong_name, wrong_output, wrong_type, no_input, small_memory])
def test_errors_of_bindings_are_the_real_ones(counted, net, fault):
    """When it is bound, or when it runs."""
    errors = []
    for module in (real, ort):
        session = module.InferenceSession(net, providers=CPU)
        with pytest.raises(Exception) as found:  # noqa: PT011 (compared)
            fault(session, session.io_binding(), feed()["x"])
        errors.append((found.type, str(found.value)))
    assert errors[0] == errors[1]


def test_other_methods_run_in_this_process(counted, net):
    """They reach the real session, which is made then, with its weights; and counted."""
    session = ort.InferenceSession(net, providers=CPU)
    assert session.get_tuning_results() == real.InferenceSession(net, providers=CPU).get_tuning_results()
    assert session._sess.run(["y"], feed(), None)[0].shape == (3, 64)
    assert counted()["in_process"][0]["times"] == 1


def test_a_session_is_used_by_many_threads(counted, net):
    """At the same time, with inputs of other sizes each."""
    session, own = ort.InferenceSession(net, providers=CPU), real.InferenceSession(net, providers=CPU)
    expected = {rows: bits(own.run(None, feed(rows))) for rows in range(1, 7)}
    wrong = []

    def run(rows):
        wrong.extend(rows for _ in range(20) if bits(session.run(None, feed(rows))) != expected[rows])

    threads = [threading.Thread(target=run, args=(rows,)) for rows in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ran(counted) == (120, 0)


def test_a_session_is_pickled(counted, net):
    """With its options."""
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("n", 2)
    options.log_severity_level = 3
    session = pickle.loads(pickle.dumps(ort.InferenceSession(net, options, providers=CPU)))
    assert session.get_inputs()[0].shape == [2, 64]
    assert session.get_session_options().log_severity_level == 3
    assert bits(session.run(None, feed(2))) == bits(real.InferenceSession(net).run(None, feed(2)))


def test_a_forked_child_connects_anew(counted, net):
    """The session of the parent runs in both."""
    session = ort.InferenceSession(net, providers=CPU)
    expected = bits(session.run(None, feed()))
    child = os.fork()
    if not child:
        try:
            os._exit(0 if bits(session.run(None, feed())) == expected else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bits(session.run(None, feed())) == expected
    assert ran(counted) == (2, 0)


@pytest.mark.parametrize("side", ["engine", "service", "both"])
def test_a_device_that_is_killed_is_invisible(counted, net, side):
    """Between two runs: equal bits, no error, and nothing runs in this process."""
    session = ort.InferenceSession(net, providers=CPU)
    expected = bits(session.run(None, feed()))
    for _ in range(2):
        (device,) = connections.devices()
        kill(device, side)
        assert bits(session.run(None, feed())) == expected
    assert bits(ort.InferenceSession(net, providers=CPU).run(None, feed())) == expected
    assert ran(counted) == (4, 0)


@pytest.mark.integration
def test_a_device_that_is_killed_during_runs_is_invisible(counted, net):
    """Two threads run while a third kills: equal bits each time."""
    session = ort.InferenceSession(net, providers=CPU)
    expected, ends = bits(session.run(None, feed())), threading.Event()
    wrong, counts = [], [0, 0]

    def run(number):
        while not ends.is_set():
            if bits(session.run(None, feed())) != expected:
                wrong.append(number)
            counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        (device,) = connections.devices()
        for _ in range(3):
            before = list(counts)
            kill(device, "both")
            while any(count <= was + 1 for count, was in zip(counts, before, strict=True)):
                assert all(thread.is_alive() for thread in threads)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert ran(counted)[1] == 0


def test_a_file_that_kills_the_device_gets_an_error_of_onnxruntime(counted, net, monkeypatch):
    """With the reason, after the second time; the program and its other inputs go on elsewhere."""
    monkeypatch.setenv("BURST_EXEC_DEVICE", "burst_test_devices.fatal:Fatal")
    session, own = ort.InferenceSession(net, providers=CPU), real.InferenceSession(net, providers=CPU)
    assert bits(session.run(None, feed())) == bits(own.run(None, feed()))
    fatal = feed()
    fatal["x"].flat[0] = 13
    with pytest.raises(
        real.capi.onnxruntime_pybind11_state.RuntimeException, match=r"RUNTIME_EXCEPTION.*quarantined.*SIGSEGV"
    ):
        session.run(None, fatal)
    assert ran(counted) == (1, 0)


def test_a_device_that_cannot_start_is_no_trouble(counted, net, monkeypatch, capsys):
    """The program runs as without us, with one line on standard error."""
    monkeypatch.setenv("BURST_EXEC_DEVICE", "no.such:Device")
    expected = bits(real.InferenceSession(net, providers=CPU).run(None, feed()))
    for _ in range(2):
        assert bits(ort.InferenceSession(net, providers=CPU).run(None, feed())) == expected
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert ran(counted) == (0, 2)


def test_weights_in_other_files_and_constants(counted, tmp_path):
    """As large models have them, down to a weight of four bytes."""
    model = onnx.load(layers(tmp_path / "net.onnx", rows=4))
    model.graph.node[1].input[0] = "halved"
    model.graph.node.insert(1, helper.make_node("Mul", ["h", "half"], ["halved"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.5], np.float32), "half"))
    path = str(tmp_path / "net.onnx")
    onnx.save(model, path)
    onnx.save(model, str(tmp_path / "big.onnx"), save_as_external_data=True, location="big.data", size_threshold=0)
    expected = real.InferenceSession(path, providers=CPU).run(None, feed(4))
    assert bits(ort.InferenceSession(str(tmp_path / "big.onnx")).run(None, feed(4))) == bits(expected)
    assert ran(counted) == (1, 0)


def test_a_scalar_input_and_an_input_with_a_value(counted, tmp_path):
    """An overridable initializer may be given and left out."""
    nodes = [helper.make_node("Mul", ["x", "k"], ["y"])]
    inputs = [tensor("x", []), tensor("k", [])]
    path = saved(tmp_path / "net.onnx", nodes, inputs, [tensor("y", [])], [("k", np.array(3, np.float32))])
    own, ours = real.InferenceSession(path, providers=CPU), ort.InferenceSession(path, providers=CPU)
    two = np.array(2, np.float32)
    for given in ({"x": two}, {"x": two, "k": two}, {"k": two, "x": two}):
        found, expected = ours.run(None, given), own.run(None, given)
        assert bits(found) == bits(expected)
        assert type(found[0]) is type(expected[0])
    assert [n.name for n in ours.get_overridable_initializers()] == ["k"]
    assert ran(counted) == (3, 0)


def outcome(work):
    """What came out, or the error: class and words."""
    try:
        return bits(work())
    except Exception as error:  # noqa: BLE001 (compared)
        return type(error), re.sub("0x[0-9a-f]+", "0x", str(error))


class Named(ort.InferenceSession):
    """A program's own, whose attributes and arguments are none of ours."""

    def __init__(self, folder, kind):
        super().__init__(f"{folder}/{kind}.onnx", providers=CPU)
        self._device, self._name, self._names, self._own, self.bare = "cpu", "mine", ["x"], 3, 4
        self.kind = kind

    def run(self, *_):
        """Something else."""
        return []

    def _refuse(self):
        """Something else."""


@pytest.mark.filterwarnings("ignore:Specified provider 'Nope'")
def test_a_subclass_has_any_attributes_and_arguments(counted, net):
    """It runs, is pickled with what it has, and gets other providers."""
    session, own = Named(os.path.dirname(net), "net"), real.InferenceSession(net, providers=CPU)
    expected = bits(own.run(None, feed()))
    session = pickle.loads(pickle.dumps(session))
    assert (session._device, session._name, session._names, session._own, session.kind) == (
        "cpu",
        "mine",
        ["x"],
        3,
        "net",
    )
    session.set_providers(CPU)
    for given in (feed(), {"x": feed()["x"].tolist()}):
        assert bits(ort.InferenceSession.run(session, None, given)) == expected
    there, found = threading.Event(), []
    session.run_async(None, feed(), lambda *told: (found.append(told), there.set()), None)
    assert there.wait(60)
    assert bits(found[0][0]) == expected
    with pytest.raises(RuntimeError, match="Unknown Provider Type: Nope") as failed:
        session.set_providers(["Nope"])
    with pytest.raises(failed.type):
        own.set_providers(["Nope"])


def zeroed(net):
    """Overwrites its weights, where it lies."""
    if net.endswith(".data"):
        os.truncate(net, 0)
        os.truncate(net, 2 * 64 * 64 * 4)
        return
    model = onnx.load(net)
    for weight in model.graph.initializer:
        weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(model, net)


@pytest.mark.parametrize("change", [zeroed, os.remove])
@pytest.mark.parametrize("is_external", [False, True])
def test_a_session_of_a_file_that_has_changed(counted, net, change, is_external, tmp_path):
    """Keeps the file and the options that it was made of, wherever it runs."""
    if is_external:
        model, net = onnx.load(net), str(tmp_path / "big.onnx")
        onnx.save(model, net, save_as_external_data=True, location="big.data", size_threshold=0)
    options = ort.SessionOptions()
    own, ours = real.InferenceSession(net, providers=CPU), ort.InferenceSession(net, options, providers=CPU)
    options.add_free_dimension_override_by_name("n", 1)
    change(str(tmp_path / "big.data") if is_external else net)
    integers, misshapen = feed()["x"].astype(int).tolist(), np.zeros((1, 63), np.float32)
    for given in (feed()["x"], feed()["x"].tolist(), integers, misshapen):
        theirs, found = (outcome(lambda each=each, given=given: each.run(None, {"x": given})) for each in (own, ours))
        assert theirs == found
    assert ran(counted) == (2, 2)


NAMES = [(), [], ["y"], ("y",), "y", {"y": 0}, ["y", 3], [["y"]], np.array(["y"])]


@pytest.mark.parametrize("names", [*NAMES, None], ids=repr)
def test_names_of_outputs_of_all_kinds(counted, net, names):
    """A list of them as in the device, and anything else as the real one takes it."""
    own, ours = real.InferenceSession(net, providers=CPU), ort.InferenceSession(net, providers=CPU)
    assert outcome(lambda: ours.run(names, feed())) == outcome(lambda: own.run(names, feed()))


def test_names_of_outputs_that_are_read_once(counted, net):
    """A generator is as good as its names."""
    own, ours = real.InferenceSession(net, providers=CPU), ort.InferenceSession(net, providers=CPU)
    names = ["y"]
    found, expected = (outcome(lambda s=s: s.run((n for n in names), feed())) for s in (ours, own))
    assert found == expected


def test_a_scalar_input_that_is_given_dimensions(counted, tmp_path):
    """ONNX Runtime takes them, and gives them back."""
    path = saved(tmp_path / "net.onnx", [helper.make_node("Neg", ["x"], ["y"])], [tensor("x", [])], [tensor("y", [])])
    own, ours = real.InferenceSession(path, providers=CPU), ort.InferenceSession(path, providers=CPU)
    for shape in ((), (1,), (2, 3)):
        given = {"x": np.ones(shape, np.float32)}
        assert outcome(lambda given=given: ours.run(None, given)) == outcome(lambda given=given: own.run(None, given))


class BytesPath:
    """A path of bytes."""

    def __init__(self, path):
        self._path = os.fsencode(path)

    def __fspath__(self):
        return self._path


def test_a_path_of_bytes(counted, net):
    """Runs, and is counted by its name."""
    session = ort.InferenceSession(BytesPath(net), providers=CPU)
    assert bits(session.run(None, feed())) == bits(real.InferenceSession(net, providers=CPU).run(None, feed()))
    assert [row["model"] for row in counted()["models"]] == ["net.onnx"]


def test_a_fault_in_the_background_is_told_in_the_real_words(counted, net):
    """Those of the real class's callback."""
    told = []
    for module in (real, ort):
        there = threading.Event()
        session = module.InferenceSession(net, providers=CPU)
        session.run_async(
            None, {"x": np.zeros((1, 63), np.float32)}, lambda *found, t=there: (told.append(found), t.set()), None
        )
        assert there.wait(60)
    assert told[0] == told[1]


def test_a_session_in_a_signals_handler(counted, net):
    """Which interrupts whatever another run is doing, in any of our lines."""
    session = ort.InferenceSession(net, providers=CPU)
    expected, interrupted, wrong = bits(session.run(None, feed())), set(), []

    def trace(frame, event, _):
        place = frame.f_code.co_filename, frame.f_lineno
        if "/dropin/" in place[0] and place not in interrupted:
            interrupted.add(place)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    def handler(*_):
        sys.settrace(None)
        if bits(session.run(None, feed())) != expected:
            wrong.append(1)
        sys.settrace(trace)

    before, tracing = signal.signal(signal.SIGUSR1, handler), sys.gettrace()
    faulthandler.dump_traceback_later(60, exit=True)
    sys.settrace(trace)
    try:
        assert bits(session.run(None, feed())) == expected
    finally:
        sys.settrace(tracing)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR1, before)
    assert not wrong
    assert len(interrupted) > 10  # lines


def test_random_numbers_are_drawn_as_in_process(counted, tmp_path):
    """A session has a stream of its own from the file's seed, so it runs here. Without one no two are the same."""
    node = helper.make_node
    nodes = [node("RandomNormalLike", ["x"], ["y"], seed=3.0)]
    path = saved(tmp_path / "net.onnx", nodes, [tensor("x", [2])], [tensor("y", [2])])
    found = []
    for module in (real, ort):
        sessions = [module.InferenceSession(path, providers=CPU) for _ in range(2)]
        found.append([bits(session.run(None, {"x": np.ones(2, np.float32)})) for session in sessions * 2])
    assert found[0] == found[1]
    assert "random" in counted()["in_process"][0]["reason"]
    path = saved(
        tmp_path / "free.onnx", [node("RandomNormalLike", ["x"], ["y"])], [tensor("x", [2])], [tensor("y", [2])]
    )
    assert ort.InferenceSession(path, providers=CPU).run(None, {"x": np.ones(2, np.float32)})[0].shape == (2,)
    assert ran(counted) == (1, 4)


def test_descriptors_are_left_to_the_program(counted, net):
    """Beyond three quarters of its limit sessions are in this process, and run."""
    expected = bits(real.InferenceSession(net, providers=CPU).run(None, feed()))
    session = ort.InferenceSession(net, providers=CPU)
    assert bits(session.run(None, feed())) == expected
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, limits[1]))
    try:
        sessions = [ort.InferenceSession(net, providers=CPU) for _ in range(20)]
        assert all(bits(each.run(None, feed())) == expected for each in (*sessions, session))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ran(counted) == (2, 20)
    (row,) = counted()["in_process"]
    assert (row["times"], "descriptors are left" in row["reason"]) == (20, True)
