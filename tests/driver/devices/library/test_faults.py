"""Drivers that go wrong: the driver is named, its clients get an error, and the device serves the next request."""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
from c_drivers import compiled

import driver
from burst import ErrorStatus, GeneralFailure, PeerDied, StatusError
from driver.devices import device_class
from driver.devices.library import description

HOW = {"crash": 1, "hang": 2, "fails": 3, "status 77": 4, "nothing": 5}
SECONDS = 1

ASKED = [
    ("open", "crash", "open ended its process with SIGSEGV"),
    ("supported", "crash", "supported ended its process with SIGSEGV"),
    ("open", "hang", f"open did not return within {SECONDS} s; its process was ended"),
    ("supported", "hang", f"supported did not return within {SECONDS} s; its process was ended"),
    ("open", "fails", "open: GENERAL_FAILURE"),
    ("open", "nothing", "open returned BURST_NONE and made nothing"),
    ("supported", "status 77", "supported returned 77, which is no burst_status"),
    ("supported", "nothing", "supported refused operation 2 of 2"),
]
ENDED = [
    ("prepare", "crash", "prepare ended the engine with SIGSEGV"),
    ("prepare", "hang", f"prepare did not return within {SECONDS} s"),
    ("bind", "crash", "bind ended the engine with SIGSEGV"),
    ("bind", "hang", f"bind did not return within {SECONDS} s"),
    ("output_shape", "crash", "output_shape ended the engine with SIGSEGV"),
    ("output_shape", "hang", f"output_shape did not return within {SECONDS} s"),
    ("execute", "crash", "execute, or a thread of its own ended the engine with SIGSEGV"),
    ("release", "hang", f"release did not return within {SECONDS} s"),
]
ANSWERED = [
    ("prepare", "fails", "prepare: GENERAL_FAILURE"),
    ("prepare", "status 77", "prepare returned 77, which is no burst_status"),
    ("prepare", "nothing", "prepare returned BURST_NONE and made nothing"),
    ("bind", "fails", "bind: GENERAL_FAILURE"),
    ("bind", "nothing", "bind returned BURST_NONE and made nothing"),
    ("execute", "fails", "execute: GENERAL_FAILURE"),
    ("execute", "status 77", "execute returned 77, which is no burst_status"),
    ("output_shape", "fails", "output_shape: output 0 has rank 9; at most 8 is possible"),
    ("output_shape", "status 77", r"output_shape: output 0 has dimensions \[2, 4\], the model says \[1, 4\]"),
    ("output_shape", "nothing", "output_shape: .* for which 16 bytes suffice, and is_sufficient is 0"),
]
LIES = [
    ("faulty.abi = 2", "its table says abi 2, this Burst speaks 1; build it with the header"),
    ("faulty.size = 16", "its table says size 16, but the required functions end at"),
    ("faulty.size -= 4", "which ends within a field"),
    ("faulty.name = NULL", "name is NULL: give a text"),
    (r'faulty.version = "\377"', "version is .* not UTF-8"),
    (r'faulty.name = "a\nb"', "can be printed"),
    ("faulty.type = 9", "its type is 9: one of burst_device_type"),
    ("faulty.slots = 5000", "its slots are 5000: executions at once, from 0 to 1024"),
    ("faulty.quantum_ns = UINT64_MAX", "its quantum_ns is"),
    ("faulty.n_code_files = 99", "at most 32 of a kind"),
    ("faulty.execute = NULL", "execute is NULL in its table: write it"),
    ("faulty.open = NULL, faulty.bind = NULL", "open, bind are NULL in its table: write them"),
    ("faulty.improves_after = improves", "improve is NULL in its table"),
    ("faulty.extensions = bad", "extensions has 'Bad Name': a name is of small letters"),
    ("return NULL", r"burst_device_get\(1\) returned NULL"),
    ("raise(SIGABRT)", "burst_device_get ended the process with SIGABRT"),
]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The path of a driver whose next fault stands in the file `orders` beside it."""
    folder = tmp_path_factory.mktemp("faulty")
    return compiled(folder / "libfaulty.so", "faulty.c", flags=[f'-DFOLDER="{folder}"', f'-DORDERS="{folder}/orders"'])


@pytest.fixture
def order(faulty):
    """Orders a fault of a function. It happens once."""

    def order(function, how):
        (faulty.parent / "orders").write_text(f"{function} {HOW[how]}")

    yield order
    (faulty.parent / "orders").unlink(missing_ok=True)


@pytest.fixture
def connect(faulty, place, monkeypatch, tmp_path):
    """Connects to that driver's device, whose functions may take a second."""
    (tmp_path / ".config/burst").mkdir(parents=True)
    (tmp_path / ".config/burst/limits.toml").write_text(f"driver_seconds = {SECONDS}\nprepare_seconds = {SECONDS}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda: driver.connect(str(faulty))


def check(device, model, x):
    """The device answers, on both paths."""
    with device.prepare(model) as prepared, prepared.burst() as burst:
        np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
        np.testing.assert_array_equal(burst.run(x).outputs[0], (x + 1) * x)


@pytest.mark.integration
@pytest.mark.parametrize(("function", "how", "words"), ASKED)
def test_what_is_asked_apart_harms_nobody_else(connect, order, model, x, function, how, words):
    """A fault in what the service asks: the client is told which function, the service stays, and the engine, too."""
    with connect() as device:
        if function == "open":  # in the next process that is asked
            order("supported", "crash")
            with contextlib.suppress(StatusError):
                device.explain(model)
        order(function, how)
        with pytest.raises(StatusError, match=f"^driver 'faulty': {words}"):
            device.explain(model)
        check(device, model, x)


@pytest.mark.integration
@pytest.mark.parametrize("path", ["plain", "burst"])
@pytest.mark.parametrize(("function", "how", "words"), ENDED)
def test_what_ends_the_engine_is_named(connect, order, model, x, path, function, how, words):
    """A crash, or a call that never returns: clients that wait are told which function of which driver, and the next
    connection is served."""
    if function == "release":
        path = "burst"  # a plain path keeps its plans, and they the model
    with connect() as device:
        with pytest.raises(PeerDied, match=f"^the device's process is gone: driver 'faulty': {words}"):
            use(device, model, path, x, lambda when: function in when and order(function, how))
        wait_for_end(device)
    with connect() as successor:
        check(successor, model, x)


def wait_for_end(device):
    """Waits for the end of the service: it is told by the kernel."""
    with contextlib.suppress(PeerDied):
        while True:
            device.call("status")


def use(device, model, path, x, reach):
    """Uses a model in every way. `reach`: called with the functions that are called next."""
    reach(["prepare"])
    prepared = device.prepare(model)
    reach(["bind", "output_shape", "execute"])
    if path == "plain":
        prepared.run(x)
    else:
        with prepared.burst() as burst:
            burst.run(x)
    reach(["release"])
    prepared.close()
    while True:  # until the end
        device.call("status")


@pytest.mark.integration
@pytest.mark.parametrize(("function", "how", "words"), ANSWERED)
def test_what_is_answered_is_checked(connect, order, model, x, function, how, words):
    """A status that is none, an object that is none, a shape that cannot be: GENERAL_FAILURE, and nothing has died."""
    with connect() as device:
        engine = device.engine_pid
        with pytest.raises(GeneralFailure, match=f"driver 'faulty': {words}"):
            use(device, model, "plain", x, lambda when: function in when and order(function, how))
        check(device, model, x)
        assert Path(f"/proc/{engine}").exists()


@pytest.mark.integration
@pytest.mark.parametrize("how", ["deadline", "client gone"])
def test_an_execution_that_does_not_end(connect, order, model, x, kit, how):
    """An execution that goes on a second after its deadline, or after its client has gone, ends the engine; others are
    told why."""
    with connect() as device, connect() as other, device.prepare(model) as prepared:
        order("execute", "hang")
        if how == "deadline":
            result = prepared.execute(kit.request([x], 16)[0], deadline=time.monotonic() + 0.2)
            assert result.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        else:
            with pytest.raises(TimeoutError):
                prepared.run(x, timeout=0.2)
            device.close()
        with pytest.raises(PeerDied, match="driver 'faulty': execute went on 1 s after its deadline or cancellation"):
            use(other, model, "plain", x, lambda _: None)
    with connect() as successor:
        check(successor, model, x)


@pytest.mark.integration
@pytest.mark.parametrize(("lie", "words"), LIES)
def test_tables_that_lie(tmp_path, lie, words):
    """A table that cannot be: the library is named, what is wrong with it, and what to do; nothing is started."""
    path = compiled(tmp_path / "liblie.so", "faulty.c", flags=[f"-DLIE={lie}"])
    with pytest.raises(driver.DeviceNotFound, match=f"^name='{path}' cannot be a device: .*{words}"):
        driver.connect(str(path))


def test_a_library_without_the_symbol(tmp_path):
    """The symbol is named."""
    path = compiled(tmp_path / "libempty.so")
    with pytest.raises(driver.DeviceNotFound, match="does not export burst_device_get"):
        device_class(str(path))


def test_a_file_that_is_no_library(tmp_path):
    """What the loader says is handed on."""
    (tmp_path / "libtext.so").write_text("no library")
    with pytest.raises(driver.DeviceNotFound, match=r"it cannot be loaded: .*libtext.so"):
        device_class(str(tmp_path / "libtext.so"))


@pytest.mark.integration
def test_a_library_that_prints(tmp_path):
    """What it prints while it is read is not taken for an answer."""
    path = compiled(tmp_path / "libprints.so", "faulty.c", flags=['-DLIE=puts("{\\"table"), fflush(stdout)'])
    assert device_class(str(path)).name == "faulty"


@pytest.mark.integration
def test_a_library_that_never_answers(tmp_path, monkeypatch):
    """Its process is ended, and the function named; on a busy machine Python may need more than half a second first."""
    path = compiled(tmp_path / "libhang.so", "faulty.c", flags=["-DLIE=for (;;) pause()"])
    for seconds in (0.5, 2.5, 12.5, 62.5):
        monkeypatch.setattr(description, "SECONDS", seconds)
        with pytest.raises(driver.DeviceNotFound, match=f"did not end within {seconds} s") as caught:
            device_class(str(path))
        if "starting Python" not in str(caught.value):
            break
    assert "burst_device_get did not end" in str(caught.value)
