"""`burst serve ./lib.so`: a driver that ends its engine is started again under the same socket."""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from c_drivers import compiled
from waiting import PATIENCE

import driver
from burst import PeerDied


@pytest.fixture
def folder():
    """For a socket, so its path is short."""
    with tempfile.TemporaryDirectory(prefix="burst-l-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def served(folder):
    """The process that serves a driver, whose next fault stands in the file `orders`; and its socket."""
    compiled(folder / "libfaulty.so", "faulty.c", flags=[f'-DFOLDER="{folder}"', f'-DORDERS="{folder}/orders"'])
    words = [sys.executable, "-m", "driver.cli", "serve", "./libfaulty.so", "--dir", str(folder / "run")]
    environment = os.environ | {"HOME": str(folder)}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=folder
    ) as process:
        try:
            address = f"{folder}/run/libfaulty.so.sock"
            assert process.stdout.readline().decode() == f"{folder}/libfaulty.so is served at {address}\n"
            yield process, address
        finally:
            process.kill()


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """A socket as systemd's, of which the command is told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{tmp_path}")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        yield sock


@pytest.mark.integration
def test_the_command_tells_systemd(systemd, served):
    """Word of the state of the service comes from the command's process, the only one that systemd believes."""
    raw, ((_, _, credentials),), *_ = systemd.recvmsg(4096, socket.CMSG_SPACE(12))
    assert raw.startswith(b"READY=1\nSTATUS=ready: ")
    assert struct.unpack("iii", credentials)[0] == served[0].pid


@pytest.mark.integration
def test_served_again_after_a_crash(served, folder, model, x):
    """A crash of the driver ends what its client waits for, with the driver's name; the command's process stays, every
    client that connects is served, and SIGTERM ends it in good order.
    """
    process, address = served
    engines = set()
    for _ in range(3):
        with driver.connect(address) as device, device.prepare(model) as prepared:
            engines.add(device.engine_pid)
            np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
            (folder / "orders").write_text("execute 1")
            with pytest.raises(PeerDied, match="driver 'faulty': execute, or a thread of its own ended the engine"):
                prepared.run(x)
    assert len(engines) == 3
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert not Path(address).exists()


@pytest.mark.integration
def test_a_burst_goes_on_after_a_crash(served, folder, model, x):
    """A burst that recovers has its result from the driver's next life."""
    _, address = served
    with driver.connect(address) as device, device.prepare(model) as prepared, prepared.burst(recover=True) as burst:
        burst.run(x)
        (folder / "orders").write_text("execute 1")
        np.testing.assert_array_equal(burst.run(x).outputs[0], (x + 1) * x)


@pytest.mark.integration
def test_the_service_ends_with_the_command(served, folder, model, x):
    """kill -9 of the command's process ends service and engine."""
    process, address = served
    with driver.connect(address) as device:
        engine = os.pidfd_open(device.engine_pid)
        process.kill()
        assert select.select([engine], [], [], PATIENCE)[0]
        os.close(engine)
