"""`burst doctor` on who serves wake words on this machine."""

import socket
import threading

import pytest

from driver.gateways.wyoming import satellite_doors

HEAD = "  sl  local_address rem_address   st\n"


@pytest.fixture
def root(monkeypatch, tmp_path):
    """A file system of its own for what the kernel says; writes a file there."""
    monkeypatch.setattr(satellite_doors, "ROOT", tmp_path)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def found():
    """By subject."""
    return {finding.subject: finding for finding in satellite_doors.wake_words()}


def test_who_listens(root):
    """For this machine alone, for others, or no process at all."""
    root("proc/net/tcp", HEAD + "   0: 0100007F:28A0 00000000:0000 0A\n   1: 00000000:0016 00000000:0000 0A\n")
    assert "wake words, port 10400" in (report := found())
    assert report["wake words, port 10400"].state == "note"
    assert "0.0.0.0" in report["wake words, port 10400"].remedy
    root("proc/net/tcp", HEAD + "   0: 0100007F:28A0 0100007F:1234 01\n")
    assert found()["wake words, port 10400"].found == "no process listens"
    root("proc/net/tcp6", HEAD + f"   0: {'0' * 32}:28A0 {'0' * 32}:0000 0A\n")
    assert found()["wake words, port 10400"].state == "ok"


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "00000000"), ("127.0.0.3", "0300007F")])
@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (b'{"type": "info", "data": {"wake": [{"models": [{"name": "alexa"}]}]}}\n', "ok"),
        (b'{"type": "info", "data_length": 51}\n{"wake": [{"models": [{"name": "alexa", "x": 1}]}]}', "ok"),
        (b"HTTP/1.1 400 Bad Request\r\n", "warning"),
        (b"", "warning"),
        (b"[]\n", "warning"),
        (b'{"type": "error", "data": {"text": "64 satellites are connected"}}\n', "warning"),
    ],
)
def test_what_answers(root, monkeypatch, answer, state, host, written):
    """A server of wake words says which it has, where it listens; another program at the port is told."""
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(20)  # for a finding that never connects
        port = listener.getsockname()[1]
        monkeypatch.setattr(satellite_doors, "PORT", port)
        root("proc/net/tcp", f"{HEAD}   0: {written}:{port:04X} 00000000:0000 0A\n")

        def serve():
            client, _ = listener.accept()
            with client:
                client.recv(100)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        finding = found()["wake words, answer"]
        thread.join()
    assert finding.state == state
    assert ("alexa" in finding.found) == (state == "ok")
    assert ("64 satellites" in finding.found) == (b"64" in answer)
