"""The log of a device does not grow without end, whatever its clients and its libraries do."""

import logging
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.service import bounded_log
from driver.service.bounded_log import ALLOWANCE, Allowance, BoundedHandler, EngineLog, LogFile, LogPipe

X, FAR = np.ones((8, 4), np.float32), np.array([99, 100, -500], np.int32)


def gather():
    """A model that fails on indices that are too large."""
    builder = driver.ModelBuilder()
    x, indices = builder.input("float32", X.shape), builder.input("int32", FAR.shape)
    builder.output(builder.operation("GATHER", x, 0, indices))
    return builder.build()


@pytest.mark.integration
@pytest.mark.parametrize("name", ["litert", "onnxruntime", "reference"])
def test_failing_operations_write_little(place, process, name):
    """Executions that fail again and again write no more than the allowances; what was left out is counted."""
    with driver.connect(name) as device, device.prepare(gather()) as prepared:
        service = process(device.service_pid)
        for _ in range(2000):
            with pytest.raises(driver.StatusError):
                prepared.run(X, FAR)
    assert service.has_ended()
    text = (place.path / f"{name}.log").read_text()
    assert len(text) < 2.5 * ALLOWANCE
    if name == "litert":
        assert "of the engine's libraries were left out)" in text.splitlines()[-1]


@pytest.mark.integration
def test_clients_that_come_again_and_fail_again(place, process):
    """The first failure of each client is logged with its stack; the log of many is bounded."""
    with driver.connect() as first:
        service = process(first.service_pid)
        for _ in range(100):
            with driver.connect() as device, device.prepare(gather()) as prepared, pytest.raises(driver.StatusError):
                prepared.run(X, FAR)
    assert service.has_ended()
    text = (place.path / "reference.log").read_text()
    assert 0 < text.count("an execution failed in an unforeseen way") < 100
    assert len(text) < 1.5 * ALLOWANCE


@pytest.fixture
def log(tmp_path):
    """A log file and its path."""
    path = tmp_path / "x.log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    yield LogFile(path, fd), path
    os.close(fd)


def test_a_long_log_is_cut(log, monkeypatch):
    """A log that has grown too long keeps its last lines, and says so."""
    monkeypatch.setattr(bounded_log, "MOST", 10_000)
    monkeypatch.setattr(bounded_log, "KEPT", 1000)
    file, path = log
    for n in range(5000):
        file.write(b"line %d\n" % n)
        assert path.stat().st_size < 11_100
    lines = path.read_text().splitlines()
    assert lines[0] == "(what was before was cut off)"
    assert lines[-1] == "line 4999"
    numbers = [int(line.split()[1]) for line in lines[1:]]
    assert numbers == list(range(numbers[0], 5000))


def test_no_file_of_others_is_cut(tmp_path, monkeypatch):
    """A file to which an administrator has led stderr is theirs."""
    monkeypatch.setattr(bounded_log, "MOST", 10)
    with open(tmp_path / "theirs", "ab") as theirs:
        LogFile(tmp_path / "x.log", theirs.fileno()).write(b"a long line of many words\n" * 10)
    assert (tmp_path / "theirs").stat().st_size == 260


def test_an_allowance_is_refilled(monkeypatch):
    """A source that was too fast may write again after a while; until then its lines are counted."""
    now = 100.0
    monkeypatch.setattr(bounded_log.time, "monotonic", lambda: now)
    allowance = Allowance("x")
    assert allowance.takes(ALLOWANCE)
    assert not allowance.takes(10)
    assert not allowance.takes(20)
    assert allowance.told() == b"(2 lines, 30 bytes, of x were left out)\n"
    assert allowance.told() == b""
    now += 1.0
    assert allowance.takes(1024)
    assert not allowance.takes(10)


def test_records_are_counted(monkeypatch):
    """Log records beyond the allowance are left out, and told with the next one."""
    written, now = [], time.monotonic()
    monkeypatch.setattr(bounded_log.time, "monotonic", lambda: now)
    handler = BoundedHandler(written.append, "the service's log")
    record = logging.LogRecord("x", logging.ERROR, "", 0, "words " * 100, (), None)
    for _ in range(1000):
        handler.emit(record)
    assert 50 * 600 < sum(map(len, written)) <= ALLOWANCE
    monkeypatch.setattr(bounded_log.time, "monotonic", lambda: now + 3600)
    handler.emit(record)
    assert b"bytes, of the service's log were left out)\n" in written[-1]


def test_last_words_are_kept(log):
    """What a process wrote just before it died is in the log when `finish` returns; a line without its end, too."""
    file, path = log
    engine = EngineLog(file)
    child = os.fork()
    if not child:
        engine.redirect()
        os.write(2, b"terminate called\nwithout an end")
        logging.getLogger().error("a record")
        os.kill(os.getpid(), signal.SIGKILL)
    engine.begin()
    engine.close_writable()
    os.waitpid(child, 0)
    engine.finish()
    lines = path.read_text().splitlines()
    assert {"terminate called", "without an end"} <= set(lines)
    assert any(line.endswith("a record") for line in lines)


def test_an_account_has_one_allowance_for_all_of_its_cells():
    """What each of them writes counts against it: an account gets no new one by ending its cell. What was left out is
    told when a cell has ended.
    """
    log, allowance = os.memfd_create("log"), Allowance("the log of uid 7")
    for _ in range(3):
        pipe = LogPipe(allowance)
        while True:
            try:
                os.write(pipe.writable, b"x" * 99 + b"\n")
            except BlockingIOError:
                break
        os.close(pipe.writable)
        pipe.finish(LogFile(Path("/"), log))
    written = os.pread(log, 1 << 20, 0)
    assert ALLOWANCE < len(written) + 100 < ALLOWANCE + 1000
    assert re.findall(rb"of the log of uid 7 were left out", written)
    os.close(log)
