"""libburst against a device: several requests in flight, deadlines, cancellation, deaths, and what is let go."""

import contextlib
import ctypes
import errno
import os
import random
import signal
import subprocess
import threading
from ctypes import byref, c_uint64, c_void_p

import numpy as np
import pytest
import stress
from held_processes import HeldProcess
from libburst_by_ctypes import (
    FOREVER,
    Adder,
    FileTensor,
    Tensor,
    checked,
    declared_functions,
    exported_functions,
    handle_of,
    mapped_pools,
    shape,
    why,
)
from waiting import until

import driver
from burst import GeneralFailure
from driver.client import moving
from driver.protocol.model_codec import encode

pytestmark = pytest.mark.integration


def soon(library, milliseconds):
    return library.burst_now() + milliseconds * 1_000_000


def test_what_is_exported_is_what_the_header_declares(installed):
    """And nothing else that another library could trip over, in the shared library, where each has a version, and in
    the static one.
    """
    declared = declared_functions("libburst/burst.h", "burst")
    assert len(declared) > 20
    versions = exported_functions(installed / "lib/libburst.so", "--dynamic", "--with-symbol-versions")
    assert versions == [f"{each}@@LIBBURST_0.1" for each in declared]
    assert exported_functions(installed / "lib/libburst.a", "--extern-only") == declared


def test_the_header_stands_alone(installed, tmp_path):
    """In C11 and in C++17, with and without exceptions, with all warnings as errors."""
    for command, header, suffix in [
        (["cc", "-std=c11"], "burst.h", "c"),
        (["c++", "-std=c++17"], "burst.h", "cpp"),
        (["c++", "-std=c++17"], "burst.hpp", "cpp"),
        (["c++", "-std=c++17", "-fno-exceptions"], "burst.hpp", "cpp"),
    ]:
        (tmp_path / f"empty.{suffix}").write_text(f"#include <{header}>\nint main() {{ return 0; }}\n")
        strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{installed}/include", "-fsyntax-only"]
        done = subprocess.run([*command, *strict, tmp_path / f"empty.{suffix}"], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_several_requests_are_in_flight(adders):
    """Eight at a time, each with memory of its own; the ninth is told to wait, and the results come in order."""
    burst = adders(depth=8)
    pools = [burst.new_pool() for _ in range(9)]
    requests = [burst.new_request(pool) for pool, _ in pools]
    for round_ in range(3):
        for i, (_, values) in enumerate(pools):
            values[:] = [*range(4), *[float(100 * i + round_)] * 4, *[0.0] * 4]
        numbers = [burst.submit(request) for request in requests[:8]]
        assert numbers == [(0, 8 * round_ + i + 1) for i in range(8)]
        assert burst.submit(requests[8])[0] == -errno.EAGAIN
        assert burst.submit(requests[0])[0] == -errno.EBUSY
        assert burst.run() == -errno.EBUSY
        for number in range(8):
            result, outcome = burst.wait()
            assert (result, outcome.status, outcome.number) == (0, 0, numbers[number][1])
            assert pools[number][1][8:] == [i + 100.0 * number + round_ for i in range(4)]
        assert burst.wait()[0] == -errno.ENOMSG
    assert burst.count()["requests"] == burst.count()["results"] == 24


def test_a_result_tells_its_shapes_and_times(adders, library):
    """The times because they were asked for; the shape of the output, as the device made it."""
    burst = adders(measure=1)
    assert burst.submit() == (0, 1)
    result, outcome = burst.wait()
    assert (result, outcome.n_shapes) == (0, 1)
    assert outcome.on_device <= outcome.in_driver < 10**7
    dimensions = shape(0, 0)
    assert library.burst_output_shape(burst.controller, 0, dimensions, 2) == 2
    assert list(dimensions) == [1, 4]
    assert library.burst_output_shape(burst.controller, 1, dimensions, 2) == -errno.EINVAL


def test_a_refusal_is_a_status(adders, library):
    """A request that does not fit the model is the device's INVALID_ARGUMENT; the burst goes on."""
    burst = adders()
    one = Tensor(burst.pool, 0, 16, 0, None)
    wrong = handle_of(library, "burst_request_new", burst.controller, 1, (Tensor * 1)(one), 1, (Tensor * 1)(one))
    assert burst.run(request=wrong) == 4
    assert "status 4" in why(library)
    assert burst.adds()


def test_a_deadline_ends_the_wait(adders, device, library):
    """While the engine stands still; the late result is dropped, and the next request has its own."""
    burst = adders()
    assert burst.adds()
    device["engine"].signal(signal.SIGSTOP)
    assert burst.run(soon(library, 20)) == -errno.ETIMEDOUT
    assert burst.run(soon(library, 20)) == -errno.ETIMEDOUT
    assert "an earlier request" in why(library)
    device["engine"].signal(signal.SIGCONT)
    assert burst.adds()
    assert burst.count()["timeouts"] == 2


def test_a_cancelled_request_has_no_result(adders, device, library):
    """The others have theirs."""
    burst = adders()
    pools = [burst.new_pool() for _ in range(3)]
    requests = [burst.new_request(pool) for pool, _ in pools]
    device["engine"].signal(signal.SIGSTOP)
    numbers = [burst.submit(request)[1] for request in requests]
    assert library.burst_cancel(burst.controller, c_uint64(numbers[1])) == 0
    assert library.burst_cancel(burst.controller, c_uint64(numbers[1])) == -errno.ENOENT
    device["engine"].signal(signal.SIGCONT)
    assert [burst.wait()[1].number for _ in range(2)] == [numbers[0], numbers[2]]
    assert burst.wait()[0] == -errno.ENOMSG


@pytest.mark.parametrize("victim", ["engine", "service"])
def test_a_death_is_told_without_recovery(adders, device, victim, library):
    """A thread that waits, and every call after it. An engine whose service dies may answer before it follows."""
    burst = adders()
    assert burst.adds()
    device["engine"].signal(signal.SIGSTOP)
    results = []
    waiting = threading.Thread(target=lambda: results.append(burst.run()))
    waiting.start()
    until(lambda: burst.count()["in_flight"])
    device[victim].signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        device["engine"].signal(signal.SIGCONT)
    waiting.join(20)
    assert results in ([-errno.EPIPE], [0] if victim == "service" else None)
    until(lambda: burst.run() == -errno.EPIPE)
    assert burst.submit()[0] == burst.wait()[0] == -errno.EPIPE


def test_what_is_in_flight_survives_a_death(adders, device):
    """Four requests, submitted before the engine is killed, are answered by its next life, with the right sums."""
    burst = adders(recover=1)
    pools = [burst.new_pool() for _ in range(4)]
    requests = [burst.new_request(pool) for pool, _ in pools]
    for i, (_, values) in enumerate(pools):
        values[:] = [*range(4), *[float(i)] * 4, *[0.0] * 4]
    device["engine"].signal(signal.SIGSTOP)
    numbers = [burst.submit(request)[1] for request in requests]
    device["engine"].signal(signal.SIGKILL)
    for number, (_, values) in zip(numbers, pools, strict=True):
        result, outcome = burst.wait()
        assert (result, outcome.number) == (0, number)
        assert values[8:] == [i + values[4] for i in range(4)]
    assert burst.count()["revivals"] == 1


def test_a_device_of_wire_version_1(library, place):
    """It speaks only what the HAL 1.2 has: one request at a time, and the same sums."""
    burst = Adder(library, device=b"burst_test_devices.own_bursts:OldFirmware", depth=8)
    assert all(burst.adds() for _ in range(20))
    other = burst.new_request(burst.pool)
    assert burst.submit()[0] == 0
    assert burst.submit(other)[0] == -errno.EAGAIN
    assert burst.wait()[0] == 0
    library.burst_request_free(other)
    burst.close()


KILLS = [5, pytest.param(stress.times(2000), marks=pytest.mark.stress)]


@pytest.mark.parametrize("kills", KILLS)
def test_the_device_is_killed_at_any_moment(library, place, tally, kills):
    """While a burst runs requests, again and again: each burst goes on by itself, and no sum is wrong or missing."""
    rng, done = random.Random(kills), 0
    while done < kills:
        burst = Adder(library, recover=1, depth=1 + rng.randrange(8))
        assert burst.adds()
        with driver.connect("reference") as connection:
            victim = HeldProcess(rng.choice([connection.service_pid, connection.engine_pid]))
        moment = rng.randrange(2000)  # requests
        for number in range(moment + 200):
            if number == moment:
                victim.signal(signal.SIGKILL)
            assert burst.adds()
        victim.end()
        assert burst.count()["revivals"] <= 1
        until(lambda burst=burst: burst.adds() and burst.count()["revivals"])
        burst.close()
        done += 1
    tally("kills of a device under a client in C", kills)


def test_memory_that_no_request_names_is_let_go(adders, device, library):
    """By the device: after fifty pools, each in one request, the engine has as many mappings of pools as before."""
    burst = adders()
    assert burst.adds()
    before = mapped_pools(device["engine"])
    for _ in range(50):
        pool, values = burst.new_pool()
        request = burst.new_request(pool)
        checked(library, burst.run(request=request))
        checked(library, library.burst_pool_free(pool))
        checked(library, library.burst_request_free(request))
        del values
    until(lambda: mapped_pools(device["engine"]) <= before)
    assert burst.count()["memories_sent"] == 51


def test_handles_are_freed_in_any_order(adders, library):
    """The connection first: everything works until the last handle is closed."""
    burst = adders()
    checked(library, library.burst_disconnect(burst.client))
    checked(library, library.burst_compiled_free(burst.compiled))
    assert burst.adds()
    checked(library, library.burst_close(burst.controller))
    checked(library, library.burst_request_free(burst.request))
    checked(library, library.burst_pool_free(burst.pool))


def test_an_encoded_model_is_prepared(library, device):
    """One that Python built and encoded, by its memfd."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    builder.output(builder.operation("NEG", x))
    encoded = encode(builder.build())
    client = handle_of(library, "burst_connect", b"reference")
    where = [c_uint64(part) for part in encoded.where]
    compiled = handle_of(library, "burst_prepare_encoded", client, encoded.fd, *where, c_uint64(FOREVER))
    controller = c_void_p()
    checked(library, library.burst_open(compiled, None, byref(controller)))
    for close, handle in [("compiled_free", compiled), ("close", controller), ("disconnect", client)]:
        checked(library, getattr(library, f"burst_{close}")(handle))


def test_a_model_file_is_prepared(library, place, tmp_path):
    """An .onnx file of int64 tensors, run by ONNX Runtime as it is: types that the HAL lacks, too."""
    onnx = pytest.importorskip("onnx")
    helper, int64 = onnx.helper, onnx.TensorProto.INT64
    tensors = [helper.make_tensor_value_info(name, int64, [4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "neg", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "neg.onnx")
    client = handle_of(library, "burst_connect", b"onnxruntime")
    tensor = FileTensor(b"int64", 1, shape(4))
    path = os.fsencode(tmp_path / "neg.onnx")
    compiled = handle_of(
        library, "burst_prepare_file", client, path, 1, byref(tensor), 1, byref(tensor), c_uint64(FOREVER)
    )
    burst = Adder.__new__(Adder)
    burst.library, burst.n = library, 8
    burst.controller = c_void_p()
    checked(library, library.burst_open(compiled, None, byref(burst.controller)))
    pool, values = burst.new_pool()
    numbers = (ctypes.c_int64 * 8).from_buffer(values)
    numbers[:4] = [1, -2, 3, 2**40]
    x, y = Tensor(pool, 0, 32, 0, None), Tensor(pool, 32, 32, 0, None)
    request = handle_of(library, "burst_request_new", burst.controller, 1, (Tensor * 1)(x), 1, (Tensor * 1)(y))
    checked(library, burst.run(request=request))
    assert numbers[4:] == [-1, 2, -3, -(2**40)]
    checked(library, library.burst_close(burst.controller))
    checked(library, library.burst_disconnect(client))
    checked(library, library.burst_compiled_free(compiled))


def test_the_runtime_directory_is_made(library, place, monkeypatch):
    """One that does not exist yet, as for Python: the first device makes it."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", f"{place}/new")
    library.burst_disconnect(handle_of(library, "burst_connect", b"reference"))
    with driver.connect("reference") as connection:
        process = HeldProcess(connection.service_pid)
    process.end()


def test_a_device_that_does_not_exist_is_one_line(library, place, capfd):
    """The complaint of the Python that should start it names the device and others, and is no traceback."""
    assert library.burst_connect(b"referense", byref(c_void_p())) == -errno.ENOENT
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("burst: ")
    assert "did you mean 'reference'?" in line
    assert "'referense' is not there" in why(library)


def python_model():
    builder = driver.ModelBuilder()
    builder.output(builder.operation("NEG", builder.input("float32", (4,))))
    return builder.build()


def test_a_renewal_leaves_it_its_engine(adders, device):
    """It goes on in the first engine, which ends with it; a program in Python goes over meanwhile."""
    burst = adders()
    assert burst.adds()
    with driver.connect("reference") as other, other.prepare(python_model()):
        first = other.connection
        first.call("renew", "a test")
        until(lambda: other.connection is not first)
        assert other.engine_pid != device["engine"].pid
        assert all(burst.adds() for _ in range(100))
        assert burst.count()["revivals"] == 0
        assert moving.await_change(other.connection, 0.0).stage == "idle"
        burst.close()
        assert device["engine"].has_ended()


def test_a_restart_is_refused_for_it(adders):
    """A device that exists once is not restarted below it, and nobody waits for that."""
    burst = adders(device=b"burst_test_devices.single:Accelerator")
    with driver.connect("burst_test_devices.single:Accelerator") as other, other.prepare(python_model()) as prepared:
        with pytest.raises(GeneralFailure, match="programs in C"):
            other.connection.call("renew", "a test")
        assert burst.adds()
        assert prepared.run(np.ones(4, np.float32))[0].tolist() == [-1.0] * 4
    burst.close()
