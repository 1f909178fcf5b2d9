"""Two accounts and a server of root's, end to end: a socket for each account, and their shared memory apart."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import accounts
import pytest
from oip_models import Client, client_memory, rows, write_sum
from tritonclient.utils import InferenceServerException

OWNER, STRANGER = "nobody", "daemon"

CONNECTS = """
import errno, json, socket, sys
def result(path):
    with socket.socket(socket.AF_UNIX) as its:
        return errno.errorcode.get(its.connect_ex(path), "connected")
print(json.dumps([result(path) for path in sys.argv[1:]]))
"""

IN_PLACE = """
import json, sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, shared_memory

address, key, other = sys.argv[1:]
client, said, x = triton.InferenceServerClient(address), {}, np.ones((2, 4), np.float32)
memory = shared_memory.create_shared_memory_region("theirs", key, 96)
try:
    shared_memory.set_shared_memory_region(memory, [x, x + 1, 0 * x])
    client.register_system_shared_memory("theirs", key, 96)
    inputs = [triton.InferInput(name, [2, 4], "FP32") for name in "xy"]
    for n, each in enumerate(inputs):
        each.set_shared_memory("theirs", 32, offset=32 * n)
    output = triton.InferRequestedOutput("sum")
    output.set_shared_memory("theirs", 32, offset=64)
    client.infer("sum", inputs, outputs=[output])
    said["sum"] = shared_memory.get_contents_as_numpy(memory, np.float32, (2, 4), offset=64).tolist()
    for what, call in {
        "other": lambda: client.register_system_shared_memory("other", other, 96),
        "none": lambda: client.register_system_shared_memory("other", "/burst-oip-no-such-file", 96),
        "load": lambda: client.load_model("sum"),
        "unload": lambda: client.unload_model("sum"),
    }.items():
        try:
            said[what] = call()
        except InferenceServerException as error:
            said[what] = error.message()
finally:
    shared_memory.destroy_shared_memory_region(memory)
print(json.dumps(said))
"""

GIVES_AWAY = """
import json, sys
from pathlib import Path
from driver.errors import DeviceFailed
from driver.gateways.oip.process import InferenceServer
said = []
for address in sys.argv[2:]:
    try:
        InferenceServer("onnxruntime", Path(sys.argv[1]), [address])
    except DeviceFailed as error:
        said.append(str(error))
print(json.dumps(said))
"""

OVER_HTTP = """
import http.client, socket, sys
connection = http.client.HTTPConnection("localhost", timeout=20)
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("GET", "/v2/models/sum/ready")
print(connection.getresponse().status)
"""


def ran(account, code, *arguments):
    """What a program of that account prints, as JSON."""
    command = accounts.python_as(pwd.getpwnam(account).pw_uid, (), code, *arguments)
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@contextmanager
def served(place, *addresses):
    """`burst serve --oip` of root's, whose sockets every account finds."""
    write_sum(place / "models" / "sum.onnx")
    words = [word for address in addresses for word in ("--oip", address)]
    command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", *words, "--models", str(place / "models")]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["oip"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def sockets():
    """.theirs and .http: of the owner; .mine: of this account."""
    if why := accounts.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="burst-oip-") as place:
        os.chmod(place, 0o711)
        paths = [f"{place}/{name}" for name in ("theirs", "http", "mine")]
        words = [f"unix:{paths[0]},owner={OWNER}", f"http+unix:{paths[1]},owner={OWNER}", f"unix:{paths[2]}"]
        with served(Path(place), *words):
            yield SimpleNamespace(theirs=paths[0], http=paths[1], mine=paths[2])


@pytest.mark.integration
def test_each_socket_is_of_one_account(sockets):
    """The owner connects to its own sockets, and to no other; a third account to none."""
    paths = [sockets.theirs, sockets.http, sockets.mine]
    owners = [pwd.getpwnam(OWNER).pw_uid] * 2 + [os.getuid()]
    assert [(os.stat(path).st_uid, os.stat(path).st_mode & 0o777) for path in paths] == [(uid, 0o700) for uid in owners]
    assert ran(OWNER, CONNECTS, *paths) == ["connected", "connected", "EACCES"]
    assert ran(STRANGER, CONNECTS, *paths) == ["EACCES"] * 3


def test_its_memory_and_no_other(sockets):
    """At its socket the owner's shared memory is used in place; this account's is refused as a file that is not there
    is. It loads and unloads nothing, and what it registered is not known at this account's socket.
    """
    client = Client(f"unix:{sockets.mine}")
    with client_memory(96) as (_, mine):
        said = ran(OWNER, IN_PLACE, f"unix:{sockets.theirs}", f"/burst-oip-theirs-{os.getpid()}", mine)
        assert said["sum"] == (0 * rows() + 3).tolist()
        assert said["other"] == said["none"]
        assert "belongs to this address's account" in said["other"]
        assert "may not load and unload" in said["load"]
        assert said["unload"] == said["load"]
        with pytest.raises(InferenceServerException, match="no shared memory region 'theirs'"):
            client.get_system_shared_memory_status("theirs")
        client.register_system_shared_memory("theirs", mine, 96)  # the same name, of another account
        client.unregister_system_shared_memory()
    client.close()


def test_over_http(sockets):
    """The owner is answered over HTTP at its own socket."""
    assert ran(OWNER, OVER_HTTP, sockets.http) == 200


def test_only_root_gives_sockets_away():
    """A server of an ordinary account is told so for both doors, and leaves no socket."""
    if why := accounts.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="burst-oip-") as place:
        os.chown(place, pwd.getpwnam(OWNER).pw_uid, -1)
        words = [f"{scheme}:{place}/s,owner={STRANGER}" for scheme in ("unix", "http+unix")]
        said = ran(OWNER, GIVES_AWAY, place, *words)
        assert len(said) == 2
        for text in said:
            assert "only root can give a socket to another account" in text
        assert os.listdir(place) == []
