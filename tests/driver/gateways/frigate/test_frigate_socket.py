"""What `burst doctor` says of the socket for Frigate."""

import os
import socket
import subprocess
import sys

import pytest

from driver.gateways.frigate.frigate_socket import frigate


@pytest.fixture
def folder(tmp_path):
    its = tmp_path / "cache"
    its.mkdir(mode=0o700)
    return its


def the_one(folder):
    (found,) = frigate(folder)
    return found


def test_without_a_folder(tmp_path):
    """It says what makes one."""
    found = the_one(tmp_path / "none")
    assert found.state == "ok"
    assert "mkdir" in found.found


def test_without_a_socket(folder):
    """Nothing is wrong; but a folder in which others may write is noted."""
    assert the_one(folder).state == "ok"
    folder.chmod(0o777)
    assert the_one(folder).remedy == f"chmod go-w {folder}"


def test_a_server(folder):
    """One that listens is told from one that has gone, and from what is no socket."""
    path = folder / "zmq_detector"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "a server listens" in the_one(folder).found
    found = the_one(folder)
    assert (found.state, "has gone" in found.found) == ("warning", True)
    path.unlink()
    path.write_text("")
    assert "is no socket" in the_one(folder).found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another account")
def test_another_account(folder):
    """It names both accounts."""
    path = folder / "zmq_detector"
    for each in (folder, *folder.parents):
        if each.stat().st_uid == 0 and str(each).startswith("/tmp/pytest"):
            each.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o700)
        program = (
            "import os, sys\nfrom pathlib import Path\nfrom driver.gateways.frigate.frigate_socket import frigate\n"
            "os.setuid(65534)\n(found,) = frigate(Path(sys.argv[1]))\nprint(found.found, found.remedy)"
        )
        said = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert "is of uid 0, and this is uid 65534" in said.stdout
    assert "run Frigate as root" in said.stdout
