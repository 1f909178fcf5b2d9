"""A driver in C as its clients see it: named by its path, over every way of a request."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from c_drivers import compiled

import driver
from burst import MissedDeadlineTransient
from driver.deadlines import due
from driver.devices import device_class
from driver.devices.library.table import ffi
from driver.interface import BindOptions, Preparation
from fmq import clock


def test_a_path_is_a_name(toy, model, x, monkeypatch):
    """`driver.connect` takes the path of a library, relative or not; both are one device, which runs models through
    `run` and through a burst."""
    monkeypatch.chdir(toy.parent)
    with driver.connect("./libtoy.so") as device, driver.connect(str(toy)) as same:
        assert (device.name, device.version, device.type) == ("toy", "1", "CPU")
        assert device.service_pid == same.service_pid
        with device.prepare(model) as prepared, prepared.burst() as burst:
            np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
            np.testing.assert_array_equal(burst.run(x).outputs[0], (x + 1) * x)


def test_compile_takes_a_path(toy, model, x):
    """`driver.compile` places a model on a library that is named by its path."""
    with driver.compile(model, devices=[str(toy)]) as compiled:
        np.testing.assert_array_equal(compiled.run(x)[0], (x + 1) * x)


def test_what_is_not_supported_is_told_with_the_reason(toy):
    """The driver's own words against an operation reach the client; the others are supported."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 2))
    builder.output(builder.operation("SUB", builder.operation("ADD", x, x, 0), x, 0))
    with driver.connect(str(toy)) as device:
        assert device.explain(builder.build()) == [None, "only ADD, MUL and RELU are supported"]


def test_a_missing_library_is_named():
    """A path at which there is no library is DeviceNotFound, before a process is started."""
    with pytest.raises(driver.DeviceNotFound, match=r"no/such.so.*build it"):
        driver.connect("/no/such.so")


def test_an_execution_calls_c_alone(toy, model, x):
    """What a listener gets is a C function, and its context."""
    device = device_class(str(toy))()
    prepared = device.prepare(model, Preparation())
    out = np.zeros(16, np.uint8)
    bound = prepared.bind([x], [out], BindOptions())
    assert bound.native
    assert bound.shapes == (((1, 4), True),)
    bound.run()
    np.testing.assert_array_equal(out.view(np.float32), ((x + 1) * x)[0])


@pytest.mark.integration
@pytest.mark.parametrize("at_once", [0, 1])
def test_how_many_models_a_driver_prepares_at_once(tmp_path, model, at_once):
    """One, while another thread waits until its deadline; as many as come, if its table says so."""
    device = device_class(str(compiled(tmp_path / "libtoy.so", "toy.c", flags=[f"-DAT_ONCE={at_once}"])))()
    begun, may_end = threading.Event(), threading.Event()

    def pace():
        begun.set()
        assert may_end.wait(20)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(device.prepare, model, Preparation(pace=pace))
        assert begun.wait(20)
        try:
            with due(clock.now() + 20_000_000):
                if at_once:
                    device.prepare(model, Preparation())
                else:
                    with pytest.raises(MissedDeadlineTransient, match="queued"):
                        device.prepare(model, Preparation())
        finally:
            may_end.set()
        first.result(20)
    device.prepare(model, Preparation())


def test_cancelled_executions_fail(toy, model, x):
    """An execution that is cancelled fails, with Python and without, and says so."""
    device = device_class(str(toy))()
    bound = device.prepare(model, Preparation()).bind([x], [np.zeros(16, np.uint8)], BindOptions())
    bound.cancel()
    with pytest.raises(driver.DriverError, match="cancelled"):
        bound.run()


def test_a_checkpoint_ends_an_execution_whose_time_is_up(toy, model, x):
    """What `host->checkpoint` returns past the deadline is the status of a missed deadline."""
    device = device_class(str(toy))()
    bound = device.prepare(model, Preparation()).bind([x], [np.zeros(16, np.uint8)], BindOptions())
    with due(1), pytest.raises(MissedDeadlineTransient):
        bound.run()
    bound.run()


def test_a_model_that_is_ready_too_late_is_released(toy, model, capfd):
    """A driver that goes on when `pace` says that its time is up: the client gets the missed deadline, and the driver
    gets its model back, at once. Nothing else is said."""
    device, released = device_class(str(toy))(), []
    table, place = device.driver.table, ffi.new("char *")
    kind = ffi.typeof(table.prepare)

    @ffi.callback(kind)
    def prepare(_device, _model, preparation, prepared, _why):
        preparation.pace(preparation.context)
        prepared[0] = ffi.cast("burst_prepared *", place)
        return 0

    @ffi.callback("void(burst_prepared *)")
    def release(prepared):
        released.append(prepared)

    def late():
        raise MissedDeadlineTransient

    table.prepare, table.release = prepare, release
    with pytest.raises(MissedDeadlineTransient):
        device.prepare(model, Preparation(pace=late))
    assert released == [ffi.cast("burst_prepared *", place)]
    assert capfd.readouterr().err == ""


def test_output_that_is_too_small(toy, model, x):
    """The shapes are told, and nothing is executed."""
    device = device_class(str(toy))()
    bound = device.prepare(model, Preparation()).bind([x], [np.zeros(15, np.uint8)], BindOptions())
    assert bound.shapes == (((1, 4), False),)
    assert bound.native is None
    with pytest.raises(driver.DriverError, match="larger buffer"):
        bound.run()


def test_threads_share_a_prepared_model(toy, model):
    """Executions of one prepared model run in several threads at once."""
    device = device_class(str(toy))()
    prepared = device.prepare(model, Preparation())
    wrong = []

    def work(number):
        x, out = np.full((1, 4), number, np.float32), np.zeros(16, np.uint8)
        bound = prepared.bind([x], [out], BindOptions())
        for _ in range(1000):
            bound.run()
            wrong.extend(out.view(np.float32)[out.view(np.float32) != (number + 1) * number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_description_is_read_in_another_process(toy):
    """Naming a library loads it into no process of the client's."""
    fresh = toy.with_name("libfresh.so")
    fresh.write_bytes(toy.read_bytes())
    with driver.connect(str(fresh)) as device:
        assert device.name == device_class(str(fresh)).name == "toy"
    assert "libfresh.so" not in Path(f"/proc/{os.getpid()}/maps").read_text()


def test_a_burst_is_served_while_python_stands_still(tmp_path, place, model, x):
    """A thread of the driver holds the engine's GIL until a thousand requests have been executed and answered: none of
    them takes Python, or there would be no answer.
    """
    path = compiled(tmp_path / "libholder.so", "holder.c", flags=["-pthread"])
    with driver.connect(str(path)) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        held = 0
        while held < 1000:
            held += int(burst.run(x, timeout=20).outputs[0][0, 0])


@pytest.mark.integration
def test_a_library_that_is_built_again(tmp_path, place, model, x):
    """Clients that connect afterwards get the new build, at once; those that were there keep the old one."""
    path = compiled(tmp_path / "libtoy.so", "toy.c")
    with driver.connect(str(path)) as before, before.prepare(model) as prepared:
        compiled(path, "toy.c", flags=['-DVERSION="2"'])
        with driver.connect(str(path)) as after, driver.connect(str(path)) as again:
            assert (before.version, after.version, again.version) == ("1", "2", "2")
            assert after.service_pid == again.service_pid != before.service_pid
            np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
            np.testing.assert_array_equal(after.prepare(model).run(x)[0], (x + 1) * x)
