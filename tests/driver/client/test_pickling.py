"""What a program gets of an execution pickles: errors with all that they say, results with their arrays and names."""

import copy
import inspect
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from inside import controller_of

import burst
import driver
import driver.errors
import fmq
from burst import ErrorStatus, OutputShape, Result, Timing
from burst.errors import Timeout, status_error
from burst.messages import Cause
from driver import errors, replicas
from driver.client.recovery import digest_of
from fmq.process_bound import ProcessBound

WAYS = {
    **{f"pickle {number}": number for number in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
CAUSE = Cause("queued", 0.25, 0.5)
SHAPES = (OutputShape((2, 3), False), OutputShape((), True))
ANSWER = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), SHAPES, message="too small")
ERRORS = [
    *(kind("what happened") for kind in (fmq.FmqError, fmq.Timeout, fmq.Closed, fmq.PeerDied, fmq.Corrupt)),
    *(kind("what happened") for kind in (fmq.RoleTaken, fmq.Busy, fmq.InvalidDescriptor)),
    *(kind("what happened") for kind in (fmq.Evicted, fmq.TooLong)),
    fmq.Overrun(3, 17),
    fmq.NoSpace("what happened"),
    *(kind("what happened") for kind in (burst.BurstError, burst.PeerDied, burst.BuffersLost, burst.Quarantined)),
    *(kind("what happened") for kind in (burst.Malformed, burst.Busy, burst.ResultsHeld, burst.InternalError)),
    burst.NotSent("what happened"),
    Timeout("what happened", "waiting for the answer", 0.125),
    *(status_error(status, "what happened", CAUSE) for status in ErrorStatus if status),
    *(status_error(status, "", CAUSE) for status in ErrorStatus if status),
    *(kind("what happened") for kind in (errors.DriverError, errors.InvalidModel, errors.LoopTimeout)),
    *(kind("what happened") for kind in (errors.DeviceNotFound, errors.DeviceFailed, errors.NotPlaced)),
    errors.ExecutionFailed(3, "ADD", "what happened"),
    errors.OutputInsufficientSize((((2, 3), False), ((4,), True))),
    errors.ImportFailed("what happened", "Loop", 7, remedy="what helps", others=2),
    errors.ImportFailed("what happened"),
    replicas.QueueFull("what happened", 0.25),
    driver.CameraFailed("what happened"),
    driver.CameraLost("what happened"),
]


def again(thing, way):
    number = WAYS[way]
    if isinstance(number, int):
        return pickle.loads(pickle.dumps(thing, number))
    return number(thing)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_it_was(error, way):
    """Of the same class, with the same text and the same value of every attribute."""
    found = again(error, way)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_raised_again_by_ray(error):
    """Ray raises, where a result is asked for, a subclass of the error and of its own that has the error as `cause`."""

    class Both(RuntimeError, type(error)):
        def __init__(self, cause):
            self.cause = cause

    again = Both(error)
    assert isinstance(again, type(error))
    assert again.cause is error


def test_every_public_error_is_in_the_table():
    """All that the packages export; a StatusError is always one of its classes."""
    modules = fmq, burst, driver, driver.errors, driver.replicas
    public = {getattr(module, name) for module in modules for name in module.__all__}
    wanted = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert wanted - {type(error) for error in ERRORS} == {burst.StatusError}


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_of_an_error_comes_along(way):
    """What `raise_for_status` raises has its whole result, output shapes too."""
    with pytest.raises(burst.StatusError) as caught:
        ANSWER.raise_for_status()
    found = again(caught.value, way)
    assert tuple(found.result) == tuple(ANSWER)
    assert type(found.result) is Result


@pytest.mark.parametrize("way", WAYS)
def test_a_result_in_shared_memory_becomes_a_copy(way, place, kit):
    """Arrays, names and timing are the same, and stay so when the burst writes there again, and when it is closed."""
    with driver.connect() as device, device.prepare(kit.add_model()) as model:
        with model.burst(measure=True) as opened:
            result = opened.run(np.full((1, 4), 1, np.float32))
            found, kept, names = again(result, way), tuple(result.timing), result.outputs.keys()
            del result
            for value in range(40):  # more than there are buffers
                opened.run(np.full((1, 4), value, np.float32))
        assert type(found) is Result
        assert found.status is ErrorStatus.NONE
        assert found.timing == Timing(*kept)
        assert found.outputs[0].tolist() == [[2.0] * 4]
        assert found.outputs.keys() == names
        assert found.outputs[names[0]].tolist() == [[2.0] * 4]


# ---- every public name


def small_model():
    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (1, 4), name="x"), np.full((1, 4), 3, np.float32), 0))
    return m.build()


MODEL = small_model()
PERFORMANCE = driver.Performance(0.5, 2.0)
ARGUMENT = burst.RequestArgument(length=16)
GRANTOR = fmq.Grantor(0, 0, 4096)
VALUES = [
    *[fmq.Flavour.BROADCAST, GRANTOR, fmq.ReaderState(1, 2, 0, 3, 4, 5), burst.ErrorStatus.NONE, burst.Usage(3)],
    *[OutputShape((2, 3), False), Timing(1, 2), CAUSE, ARGUMENT, burst.Request((ARGUMENT,), (ARGUMENT,), ())],
    *[ANSWER, burst.Accepted(2, 3), burst.DeviceBuffer(4), PERFORMANCE, driver.FenceState.ACTIVE],
    *[
        driver.BufferDesc((1, 4)),
        driver.BufferRole(0, 0, 1.0),
        driver.CacheFiles(1, 2),
        driver.Batch(8),
        driver.Saved((b"1",), (b"2",)),
    ],
    *[driver.DeviceStatus("available"), driver.ExecutionInfo(burst.ErrorStatus.NONE, Timing(), Timing(1, 2))],
    driver.Capabilities({"FLOAT32": PERFORMANCE}, *[PERFORMANCE] * 4, "measured"),
    *[replicas.ServeOptions(), MODEL, MODEL.main, MODEL.main.operands[0], MODEL.main.operations[0], MODEL.inputs[0]],
]
FOR_AUTHORS = {driver.Device, driver.PreparedModel, burst.BurstExecutorWithCache}  #: to be derived from
FOUND_ELSEWHERE = {
    *[fmq.QueueInfo, driver.DeviceInfo, driver.ModelBuilder],  # `test_what_is_found_pickles`
    *[fmq.Descriptor, fmq.Region, fmq.EventFlag, fmq.MessageQueue],  # `test_memory_goes_to_a_process_of_ours`
    *[burst.Memory, burst.HardwareBuffer],
    *[driver.CompiledModel, driver.RemotePreparedModel, replicas.Serving],  # `test_a_compiled_model_runs_in_a_pool`
}
REFUSED = {burst.Offer, driver.Cache}  #: tuples of what belongs to a process


def public_classes():
    modules = fmq, burst, driver, driver.replicas
    found = {getattr(module, name) for module in modules for name in module.__all__}
    return {kind for kind in found if inspect.isclass(kind) and not issubclass(kind, Exception)}


def test_every_public_class_pickles_or_says_why_not():
    """One that is new has to be put into the tables of this file, or be bound to its process, which says so."""
    refuse = {kind for kind in public_classes() if kind.__reduce__ is ProcessBound.__reduce__}
    assert public_classes() - refuse - {type(value) for value in VALUES} - FOUND_ELSEWHERE == FOR_AUTHORS | REFUSED
    assert all(kind.to_send is not ProcessBound.to_send for kind in refuse)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value, way):
    """Of the same class, with the same text."""
    found = again(value, way)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_found_pickles(way):
    """Devices, as `driver.devices` lists them; queues, as `fmq.inspect` does; a model that is being built goes on."""
    assert again(driver.devices(), way) == driver.devices()
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    (found, y) = again((builder, x), way)
    found.output(found.operation("ADD", y, y, 0))
    assert found.build().outputs[0].shape == (1, 4)


@pytest.mark.parametrize("way", WAYS)
def test_what_belongs_to_a_process_says_so(way, fast, kit):
    """By the name of its class, with what to send in its place."""
    queue = fmq.MessageQueue.create("u1", 8)
    request, _ = kit.request([np.zeros((1, 4), np.float32)], 16)
    with (
        fast.burst() as opened,
        driver.compile(MODEL, ["cpu"]) as compiled,
        compiled.burst() as local,
        compiled.serve(replicas=1) as server,
        fast.execute_fenced(request) as fenced,
    ):
        device, controller = fast.device, controller_of(opened)
        bound = [device, opened, opened.submit(), queue.writer(), queue.reader(), local, server, fenced, controller]
        for thing in [*bound, controller.trace, driver.Cache(b"", (3,), ())]:
            with pytest.raises(TypeError, match=rf"a {type(thing).__name__} .*cannot be pickled.*: [a-z]"):
                again(thing, way)


@pytest.mark.parametrize("way", WAYS)
def test_memory_goes_to_a_process_of_ours(way):
    """Memory, regions, queues and event flags: what arrives is the same memory."""
    memory, region = burst.Memory.create(16), fmq.Region.create(4096)
    queue = fmq.MessageQueue.create("u1", 8)
    with again(queue, way).reader() as reader:
        queue.writer().write(np.arange(3, dtype=np.uint8))
        assert reader.read(3, 10).tolist() == [0, 1, 2]
    again(memory, way).asarray(np.uint8, (16,))[:] = 7
    assert memory.asarray(np.uint8, (16,)).tolist() == [7] * 16
    again(fmq.EventFlag(region, 64), way).wake(4)
    assert fmq.EventFlag(region, 64).wait(4, 10) == 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model in both formats' files: x + 3."""
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])],
        "net",
        [value("x", 1, [1, 4])],
        [value("y", 1, [1, 4])],
        [onnx.numpy_helper.from_array(np.full((1, 4), 3, np.float32), "w")],
    )
    path = tmp_path_factory.mktemp("models") / "net.onnx"
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("asked", [False, True], ids=["fresh", "whose second form was made"])
@pytest.mark.parametrize("form", ["auto", "file", "operations"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_model_pickles_in_each_form(files, form, way, asked):
    """It is the same model by its digest, and what arrives still has both forms."""
    model = driver.load(files, form=form)
    if asked and form == "auto":
        model.form_for(())
    found = again(model, way)
    assert digest_of(found) == digest_of(model)
    if form != "file":
        with driver.compile(found, ["cpu"]) as compiled:
            assert compiled.run(np.ones((1, 4), np.float32))[0].tolist() == [[4.0] * 4]


@pytest.mark.integration
def test_a_compiled_model_runs_in_a_pool(files):
    """Of processes that are spawned: it is compiled again there, and the outputs come back with their names."""
    spawn = multiprocessing.get_context("spawn")
    x = np.ones((1, 4), np.float32)
    with ProcessPoolExecutor(1, mp_context=spawn) as pool, driver.compile(driver.load(files), ["cpu"]) as compiled:
        for form in ("auto", "file", "operations"):
            model = driver.load(files, form=form)
            assert pool.submit(digest_of, model).result(60) == digest_of(model)
        found = pool.submit(type(compiled).run, compiled, x).result(60)
    assert found["y"].tolist() == [[4.0] * 4]
