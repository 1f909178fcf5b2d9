"""Two accounts and a server of root's: a socket and a process for each account."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import accounts
import numpy as np
import pytest
from waiting import PATIENCE

pytest.importorskip("tokenizers")
from text_nets import Asker, vector_of, write_embedder

pytestmark = pytest.mark.integration

OWNER, STRANGER = "nobody", "daemon"
ASKS = """
import http.client, json, socket, sys
connection = http.client.HTTPConnection("localhost", timeout=60)
connection.sock = socket.socket(socket.AF_UNIX)
try:
    connection.sock.connect(sys.argv[1])
except PermissionError:
    print("null")
else:
    connection.request("POST", "/v1/embeddings", json.dumps({"model": "texts", "input": "w1 w2"}))
    print(connection.getresponse().read().decode())
"""


def asked(account, path):
    """What that account is told there; None if it may not connect."""
    command = accounts.python_as(pwd.getpwnam(account).pw_uid, (), ASKS, path)
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place():
    """A folder that every account may enter, with a model."""
    if why := accounts.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="burst-texts-") as found:
        os.chmod(found, 0o711)
        write_embedder(Path(found) / "texts")
        yield Path(found)


def command(place, *addresses):
    words = [word for address in addresses for word in ("--http", address)]
    return [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", "--embeddings", f"{place}/texts", *words]


def test_each_account_has_a_process(place):
    """It answers its own account, whose process has its uid and no capability; others may not connect."""
    theirs, mine = place / "theirs", place / "mine"
    words = [*command(place, f"unix:{theirs},owner={OWNER}", f"unix:{mine}"), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert json.loads(process.stdout.readline())["http"] == [f"unix:{theirs}", f"unix:{mine}"]
            for vector in (
                asked(OWNER, theirs)["data"][0]["embedding"],
                Asker(f"unix:{mine}").vectors("w1 w2")[0],
            ):
                np.testing.assert_allclose(vector, vector_of("w1 w2"), atol=1e-5)
            assert asked(STRANGER, theirs) is None
            assert asked(OWNER, mine) is None
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            found = [dict(_status(pid)) for pid in children]
            assert {row["Uid"].split()[0] for row in found} == {"0", str(pwd.getpwnam(OWNER).pw_uid)}
            assert {(row["CapEff"], row["NoNewPrivs"], row["Seccomp"]) for row in found} == {("0" * 16, "1", "2")}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
    assert not theirs.exists()
    assert not mine.exists()


def _status(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        yield line.split(":\t", 1)


def test_a_folder_that_the_account_cannot_read(place):
    """Is told with the remedy, and leaves no socket."""
    (place / "texts").chmod(0o700)
    try:
        words = command(place, f"unix:{place}/s,owner={OWNER}")
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    finally:
        (place / "texts").chmod(0o755)
    assert done.returncode == 2
    assert f"may not read {place}/texts" in " ".join(done.stderr.split())
    assert os.listdir(place) == ["texts"]
