"""Two accounts and a server of root's, end to end: a socket for each account, and their shared memory apart."""

import json
import os
import pwd
import select
import signal
import socket
import struct
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
from waiting import PATIENCE

from burst.channel import refuse_descriptors
from driver.engine.sandbox import OF_CELLS
from driver.gateways.door_address import DoorAddress

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

ASKS = """
import json, sys
import numpy as np
import tritonclient.grpc as triton
inputs = [triton.InferInput(name, [2, 4], "FP32") for name in "xy"]
for each in inputs:
    each.set_data_from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))
print(json.dumps(triton.InferenceServerClient(sys.argv[1]).infer("sum", inputs).as_numpy("sum").tolist()))
"""

OPENS = """
import errno, json, sys
def result(path):
    try:
        open(path, "rb").close()
    except OSError as error:
        return errno.errorcode[error.errno]
print(json.dumps([result(path) for path in sys.argv[1:]]))
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
def served(place, *addresses, device="onnxruntime", code=0):
    """`burst serve --oip` of root's, whose sockets every account finds. It ends with that exit status."""
    write_sum(place / "models" / "sum.onnx")
    words = [word for address in addresses for word in ("--oip", address)]
    command = [sys.executable, "-m", "driver.cli", "serve", device, *words, "--models", str(place / "models")]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, json.loads(process.stdout.readline())["oip"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == code
        finally:
            process.kill()


@contextmanager
def open_place():
    """A folder that every account may enter."""
    if why := accounts.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="burst-oip-") as place:
        os.chmod(place, 0o711)
        yield Path(place)


def listener_at(path):
    """The process that listens there, from the kernel."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def children(pid):
    """The processes that it has begun."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def statuses(pid):
    """What /proc says of each thread."""
    for file in Path(f"/proc/{pid}/task").glob("*/status"):
        yield dict(line.split(":\t", 1) for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def sockets():
    """.theirs and .http: of the owner; .mine: of this account."""
    with open_place() as place:
        paths = [f"{place}/{name}" for name in ("theirs", "http", "mine")]
        words = [f"unix:{paths[0]},owner={OWNER}", f"http+unix:{paths[1]},owner={OWNER}", f"unix:{paths[2]}"]
        with served(place, *words) as (process, said):
            assert said == [word.partition(",")[0] for word in words]
            yield SimpleNamespace(theirs=paths[0], http=paths[1], mine=paths[2], pid=process.pid)


@pytest.mark.integration
def test_each_socket_is_of_one_account(sockets):
    """The owner connects to its own sockets, and to no other; a third account to none."""
    paths = [sockets.theirs, sockets.http, sockets.mine]
    owners = [pwd.getpwnam(OWNER).pw_uid] * 2 + [os.getuid()]
    assert [(os.stat(path).st_uid, os.stat(path).st_mode & 0o777) for path in paths] == [(uid, 0o700) for uid in owners]
    assert ran(OWNER, CONNECTS, *paths) == ["connected", "connected", "EACCES"]
    assert ran(STRANGER, CONNECTS, *paths) == ["EACCES"] * 3


@pytest.mark.integration
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


def test_no_descriptor_reaches_a_gateway(sockets):
    """gRPC and aiohttp receive on the sockets; the kernel refuses messages with descriptors there, from the first byte
    of a connection on.
    """
    for path in sockets.theirs, sockets.http, sockets.mine:
        with socket.socket(socket.AF_UNIX) as sock:
            if not refuse_descriptors(sock):
                pytest.skip("before Linux 6.16 the kernel cannot refuse descriptors")
            sock.connect(path)
            with pytest.raises(PermissionError):
                socket.send_fds(sock, [b"x"], [0])


def test_it_keeps_no_more_of_root_than_the_sockets(sockets):
    """The process that serves an account is that account's; no thread of it, of root's own, or of the one that root has
    started, has a capability, may get one, or makes calls beside those of a program that computes. What starts the
    device has the capabilities of a device.
    """
    owner = pwd.getpwnam(OWNER).pw_uid
    theirs, mine = listener_at(sockets.theirs), listener_at(sockets.mine)
    assert listener_at(sockets.http) == theirs
    assert set(children(sockets.pid)) == {theirs, mine}
    for pid, uid in ((theirs, owner), (mine, 0), (sockets.pid, 0)):
        for found in statuses(pid):
            assert set(found["Uid"].split()) == {str(uid)}
            assert {int(found[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb")} == {0}
            assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    for found in statuses(theirs):
        assert set(found["Gid"].split()) == {str(pwd.getpwnam(OWNER).pw_gid)}
        assert "0" not in found["Groups"].split()
    assert ran(OWNER, OPENS, f"/proc/{theirs}/mem", f"/proc/{theirs}/environ") == ["EACCES"] * 2
    starters = [pid for server in (theirs, mine) for pid in children(server)]
    assert len(starters) == 2
    for found in (found for pid in starters for found in statuses(pid)):
        assert not int(found["CapBnd"], 16) & ~OF_CELLS
        assert found["NoNewPrivs"] == "1"


def test_no_account_waits_for_another_ones_process(sockets):
    """While the process of one account stands still, as in a decoder that holds its interpreter, others are served."""
    theirs = listener_at(sockets.theirs)
    os.kill(theirs, signal.SIGSTOP)
    try:
        client = Client(f"unix:{sockets.mine}")
        assert client.sum(rows(), rows(), client_timeout=PATIENCE).as_numpy("sum").tolist() == (2 * rows()).tolist()
        client.close()
    finally:
        os.kill(theirs, signal.SIGCONT)


@pytest.mark.integration
def test_an_account_that_ends_its_process():
    """As it can, ends no other's; the gateway says so, and its exit status, too."""
    with open_place() as place, served(place, f"unix:{place}/theirs,owner={OWNER}", f"unix:{place}/mine", code=2) as _:
        theirs = listener_at(place / "theirs")
        pidfd = os.pidfd_open(theirs)
        os.kill(theirs, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
        client = Client(f"unix:{place}/mine")
        assert client.sum(rows(), rows()).as_numpy("sum").tolist() == (2 * rows()).tolist()
        client.close()


@pytest.mark.integration
def test_a_folder_that_the_account_cannot_read():
    """Is told with the remedy, and leaves no socket."""
    with open_place() as place:
        write_sum(place / "models" / "sum.onnx")
        (place / "models").chmod(0o700)
        words = ["--oip", f"unix:{place}/s,owner={OWNER}", "--models", str(place / "models")]
        command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 2
        assert f"may not read {place}/models" in " ".join(done.stderr.split())
        assert os.listdir(place) == ["models"]


@pytest.mark.integration
def test_the_process_that_root_has_started_is_killed():
    """Those of the accounts end with it, and what starts the device with them."""
    with (
        open_place() as place,
        served(place, f"unix:{place}/theirs,owner={OWNER}", code=-signal.SIGKILL) as (keeper, _),
    ):
        theirs = listener_at(place / "theirs")
        pidfds = [os.pidfd_open(pid) for pid in (theirs, *children(theirs))]
        assert len(pidfds) == 2
        keeper.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PATIENCE)[0]
            os.close(pidfd)


@contextmanager
def served_device(place, *words):
    """`burst serve` of a device, and its socket."""
    command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", "--dir", f"{place}/device", *words]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as device:
        try:
            yield device, json.loads(device.stdout.readline())["socket"]
        finally:
            device.terminate()


@pytest.mark.integration
def test_a_device_that_is_served_to_a_group():
    """The process of each account connects as that account, which need not be of the group, and has a cell of its own
    there.
    """
    group = str(pwd.getpwnam(STRANGER).pw_gid)
    with (
        open_place() as place,
        served_device(place, "--group", group) as (device, path),
        served(place, f"unix:{place}/theirs,owner={OWNER}", f"unix:{place}/mine", device=path),
    ):
        client = Client(f"unix:{place}/mine")
        client.sum(rows(), rows())
        home = children(device.pid)
        assert ran(OWNER, ASKS, f"unix:{place}/theirs") == (2 * rows()).tolist()
        assert len(children(device.pid)) == len(home) + 1
        assert not any(children(listener_at(f"{place}/{name}")) for name in ("theirs", "mine"))
        client.close()


@pytest.mark.integration
def test_a_device_that_is_served_to_root_alone():
    """A process beside connects to it for the account's, and can do no more than that."""
    with (
        open_place() as place,
        served_device(place) as (_, path),
        served(place, f"unix:{place}/theirs,owner={OWNER}", device=path),
    ):
        assert ran(OWNER, ASKS, f"unix:{place}/theirs") == (2 * rows()).tolist()
        (starter,) = children(listener_at(f"{place}/theirs"))
        assert [found["Seccomp"] for found in statuses(starter)] == ["2"]


@pytest.mark.integration
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


def test_refusing_descriptors_opens_none(tmp_path):
    """The sockets of this process are looked at, and nothing else of it stays open twice: a pipe ends."""
    end, begin = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        DoorAddress.of_path("--oip", str(tmp_path / "s"), os.getuid()).refuse_descriptors()
        os.close(begin)
        assert os.read(end, 1) == b""
    os.close(end)
