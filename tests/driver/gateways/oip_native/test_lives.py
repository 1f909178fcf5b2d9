"""The ends of the processes of a server whose door is in C++: the device, the door, and the command."""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import numpy as np
import pytest
from half_request import HalfRequest
from held_processes import HeldProcess
from native_doors import answered, served_of, serving, until_here
from oip_models import Client, client_memory, rows, write_sum
from tritonclient.utils import InferenceServerException, shared_memory
from waiting import PATIENCE, until

import driver
from driver.gateways.oip import messages
from driver.gateways.oip.native_door import VARIABLE

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path, program):
    """With a client of its own."""
    write_sum(tmp_path / "models" / "sum.onnx")
    with (
        serving(tmp_path / "models", [f"unix:{tmp_path}/s"], program) as found,
        contextlib.closing(Client(found.addresses[0])) as found.client,
    ):
        until_here(found, found.client)
        yield found


def asking(server, stop):
    """Asks in four threads until then; the answers that were wrong, and errors."""

    def ask_on(number):
        wrong = []
        with contextlib.closing(Client(server.addresses[0])) as client:
            while not stop.is_set():
                x = rows(2, number)
                try:
                    if not np.array_equal(client.sum(x, x).as_numpy("sum"), 2 * x):
                        wrong.append("another sum")
                except InferenceServerException as error:
                    wrong.append(str(error))
        return wrong

    threads = ThreadPoolExecutor(4)
    return threads, [threads.submit(ask_on, number) for number in range(4)]


def test_the_device_is_killed(server):
    """A device that is killed while requests run is started again, and each of them is answered."""
    stop = threading.Event()
    threads, asked = asking(server, stop)
    with threads:
        try:
            for _ in range(3):
                with driver.connect("onnxruntime") as device:
                    os.kill(device.engine_pid, signal.SIGKILL)
                before = answered(server, "sum")
                until(lambda before=before: answered(server, "sum") > before + 20)
        finally:
            stop.set()
        assert [each.result() for each in asked] == [[]] * 4


def test_the_door_is_killed(server):
    """A door that is killed is started again, and is told again of models and memory."""
    first, (served,) = server.doors[0].pid, served_of(server, "sum")
    for _ in range(10):
        server.client.sum(rows(), rows())
    before = served.statistics()["inference_count"]
    os.kill(first, signal.SIGKILL)
    until(lambda: server.doors[0].pid != first)

    def is_served():
        with contextlib.closing(Client(server.addresses[0])) as client, contextlib.suppress(InferenceServerException):
            client.sum(rows(), rows())
            return answered(server, "sum")

    until(is_served)
    assert served.statistics()["inference_count"] > before


def test_a_region_without_a_descriptor(server):
    """A region whose file the door cannot take for want of descriptors is Python's alone; the door goes on."""
    pid, client = server.doors[0].pid, server.client
    assert client.is_server_live()  # its own connection to Python's door is there, then
    with client_memory(4096) as (region, key):
        shared_memory.set_shared_memory_region(region, [rows(), rows()])
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        most = next(number for number in itertools.count() if number not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
        client.register_system_shared_memory("late", key, 4096)
        given = [client.placed(n, rows(), "FP32", "late", 32, 32 * i) for i, n in enumerate("xy")]
        np.testing.assert_array_equal(client.infer("sum", given).as_numpy("sum"), 2 * rows())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        client.unregister_system_shared_memory("late")
    assert server.doors[0].pid == pid


def test_the_door_ends_while_it_is_started_again(server):
    """Closing waits for no process that nobody ends."""
    (door,) = server.doors
    begun, may_go, start = threading.Event(), threading.Event(), door._start

    def slow():
        begun.set()
        may_go.wait(PATIENCE)
        start()

    door._start = slow
    os.kill(door.pid, signal.SIGKILL)
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=door.close, args=(1.0,), daemon=True)
    closing.start()
    until(door._end.is_set)
    may_go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_device_that_died_between_requests(server, tmp_path):
    """A model that is changed after its device has died runs here again."""
    with driver.connect("onnxruntime") as device:
        os.kill(device.engine_pid, signal.SIGKILL)
    write_sum(tmp_path / "models" / "sum.onnx", operator="Sub")
    until(lambda: server.client.sum(rows(), rows()).as_numpy("sum").max() == 0)
    before = answered(server, "sum")
    until(lambda: [server.client.sum(rows(), rows())] and answered(server, "sum") > before)


@contextlib.contextmanager
def open_stream(server):
    over = threading.Event()

    def silent():
        yield messages.ModelInferRequest(model_name="nothing").SerializeToString()
        over.wait(PATIENCE)

    with grpc.insecure_channel(server.addresses[0]) as channel:
        answers = channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer")(silent())
        assert next(answers)
        yield
        over.set()


@contextlib.contextmanager
def half_a_message(server):
    with contextlib.closing(HalfRequest(server.addresses[0], 1 << 20)) as call:
        call.send(1 << 10)
        yield


@contextlib.contextmanager
def stopped(server, *, leaves=False, unloads=False):
    """A request that a device has which stands still. leaves: its client hangs up. unloads: the model goes first."""
    with driver.connect("onnxruntime") as device:
        engine = device.engine_pid
    tensors = [{"name": name, "datatype": "FP32", "shape": [2, 4]} for name in "xy"]
    packet = messages.ModelInferRequest(model_name="sum", inputs=tensors, raw_input_contents=[rows().tobytes()] * 2)
    (served,) = served_of(server, "sum")
    os.kill(engine, signal.SIGSTOP)
    try:
        with grpc.insecure_channel(server.addresses[0]) as channel:
            infer = channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
            asked = [infer.future(packet.SerializeToString()) for _ in range(3)]
            channel.unary_unary(f"/{messages.SERVICE}/ServerLive")(b"")
            if unloads:
                server.doors[0].gone(served)
            if leaves:
                for each in asked:
                    each.cancel()
                channel.close()
            yield
    finally:
        os.kill(engine, signal.SIGCONT)


ENDS = {
    "a stream": open_stream,
    "half a message": half_a_message,
    "a request": stopped,
    "a request whose client has gone": partial(stopped, leaves=True),
    "a request of a model that has gone": partial(stopped, unloads=True, leaves=True),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_runs_at_the_end(server, caplog, what):
    """It is answered or not, but the door ends with 0, by itself."""
    with ENDS[what](server):
        server.doors[0].close(10.0)
        assert not [each for each in caplog.messages if "has ended with" in each]


def test_a_file_that_changes(server, tmp_path):
    """A model whose file is replaced has the new one's answers, and no request is lost meanwhile."""
    stop, wrong = threading.Event(), []

    def ask_on():
        with contextlib.closing(Client(server.addresses[0])) as client:
            while not stop.is_set():
                found = client.sum(rows(), rows() + 1).as_numpy("sum")
                if not any(np.array_equal(found, each) for each in (2 * rows() + 1, rows() - rows() - 1)):
                    wrong.append(found)

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask_on)
        try:
            write_sum(tmp_path / "models" / "sum.onnx", operator="Sub")
            until(lambda: server.client.sum(rows(), rows()).as_numpy("sum").max() == 0)
            before = answered(server, "sum")
            until(lambda: [server.client.sum(rows(), rows())] and answered(server, "sum") > before)
        finally:
            stop.set()
        asked.result()
    assert wrong == []


@contextlib.contextmanager
def command(tmp_path, program):
    """`burst serve` with the door in C++, as a process, and a client."""
    write_sum(tmp_path / "models" / "sum.onnx")
    words = ["onnxruntime", "--oip", f"unix:{tmp_path}/s", "--models", str(tmp_path / "models"), "--json"]
    line = [sys.executable, "-m", "driver.cli", "serve", *words]
    with subprocess.Popen(
        line, env={**os.environ, VARIABLE: str(program)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            (address,) = json.loads(process.stdout.readline())["oip"]
            with contextlib.closing(Client(address)) as client:
                yield process, client
        finally:
            process.kill()


def door_of(process):
    """The number of the door's process."""
    children = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout
    (found,) = [int(line.split()[0]) for line in children.splitlines() if "burst-oip" in line]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends(tmp_path, program, number):
    """It ends with 0, and so does its door, whose socket goes with it."""
    with command(tmp_path, program) as (process, client):
        client.sum(rows(), rows())
        door = HeldProcess(door_of(process))
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert door.has_ended()
        assert "terminate called" not in process.stderr.read()
    assert not (tmp_path / "s").exists()


def test_the_command_is_killed(tmp_path, program):
    """Its door ends, too."""
    with command(tmp_path, program) as (process, client):
        client.sum(rows(), rows())
        door = HeldProcess(door_of(process))
        process.kill()
        assert door.has_ended()


def test_the_door_is_ended(tmp_path, program):
    """SIGTERM to the door alone: it answers what runs, and ends with 0; its command starts it again."""
    with command(tmp_path, program) as (process, client):
        client.sum(rows(), rows())
        number = door_of(process)
        os.kill(number, signal.SIGTERM)
        assert any("has ended with 0, and is started again" in line for line in process.stderr)
        until(lambda: door_of(process) != number)
