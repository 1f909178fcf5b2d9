"""Finding a device, starting it, and leaving nothing behind."""

import contextlib
import os
import pwd
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import driver
from burst_engine.names import install_command
from driver import plugins
from driver.client import discovery
from driver.devices.litert import wheel
from driver.devices.onnxruntime import library as onnxruntime_library
from driver.doctor import machine
from driver.service.client_source import ListeningSocket

CONNECT = "import driver\nwith driver.connect() as d: print(d.service_pid, d.engine_pid)"


def test_first_use_starts_it(place, new_interpreters):
    """A device is started by whoever needs it first, and found by all who come later, in any process."""
    assert place.pids() == []
    with driver.connect() as first, driver.connect() as second:
        assert (first.name, first.type) == ("reference", "CPU")
        pids = (first.service_pid, first.engine_pid)
        assert (second.service_pid, second.engine_pid) == pids
        found = subprocess.run([sys.executable, "-c", CONNECT], check=True, capture_output=True, text=True)
        assert tuple(map(int, found.stdout.split())) == pids
        assert place.pids() == sorted(pids)


def test_asking_starts_nothing(place):
    """devices() tells what is installed without starting it."""
    assert "reference" in [found.name for found in driver.devices()]
    assert (place.pids(), place.files()) == ([], [])


@pytest.mark.integration
@pytest.mark.parametrize("count", [6, pytest.param(16, marks=pytest.mark.stress)])
def test_many_at_once(place, kit, count):
    """Processes that connect at the same moment share one service and one engine."""
    code = "import os, sys, driver\nsys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read(1)\n" + CONNECT
    code += "; sys.stdout.flush(); os.close(1); sys.stdin.read()"  # connected until we close the pipe
    clients = [kit.python(code, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    for client in clients:
        assert client.stdout.read(1) == b"."
    for client in clients:
        client.stdin.write(b"!")
    answers = {client.stdout.read() for client in clients}
    assert len(answers) == 1
    pids = [int(pid) for pid in answers.pop().split()]
    assert len(pids) == 2
    assert pids == place.pids()
    for client in clients:
        client.stdin.close()
        client.stdout.close()
        assert client.wait(kit.patience) == 0


@pytest.mark.integration
def test_gone_when_nobody_needs_it(place, process, kit):
    """A device that nobody needs any more ends by itself, and leaves only its lock and its log."""
    before = kit.named_memory()
    with driver.connect() as device:
        service, engine = process(device.service_pid), process(device.engine_pid)
        assert not service.has_ended(0)
    assert service.has_ended()
    assert engine.has_ended()
    assert place.files() == ["reference.lock", "reference.log"]
    assert kit.until(lambda: kit.named_memory() <= before)


def children():
    """Of this process, zombies too."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_no_zombie(place, process, new_interpreters):
    """A device is nobody's child: its end leaves no zombie in the process that started it."""
    before = children()
    with driver.connect() as device:
        service = process(device.service_pid)
        assert children() <= before  # those of other tests
        service.kill()
        assert service.has_ended()
        assert children() <= before


@pytest.mark.integration
def test_comes_while_it_retires(place, kit):
    """Who connects at the very moment in which a device retires gets one all the same."""
    path = place.path / "reference.sock"
    with driver.connect() as device:
        pid = device.service_pid
    # The listener vanishes some way before the process does: arrive in between.
    kit.until(lambda: not path.exists())
    with driver.connect() as successor:
        assert successor.service_pid != pid
        assert successor.prepare(kit.add_model())


def test_retirement_looks_once_more(place):
    """A service does not retire while a client waits in its backlog, or is starting a service."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path, finished = place.path / "x.sock", []
    listener.bind(str(path))
    listener.listen()
    here = discovery.Place(place.path, "x")
    source = ListeningSocket(listener, here)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
        assert not source.retire(lambda: finished.append(1))
        listener.accept()[0].close()
    with here.locked():
        assert not source.retire(lambda: finished.append(1))
    assert path.exists()
    assert not finished
    assert source.retire(lambda: finished.append(1))
    assert not path.exists()
    assert finished


@pytest.mark.parametrize("is_confined", [False, True])
def test_a_successors_socket_stays(place, is_confined):
    """A service that leaves does not take away the socket of its successor, but its own; also one that cannot connect
    to see who listens there.
    """
    here = discovery.Place(place.path, "x")

    def listening():
        listener = discovery.listen(here)
        return listener, os.stat(here.socket) if is_confined else None

    old, named = listening()
    new, its = listening()
    here.leave(old, named=named)
    assert here.socket.exists()
    here.leave(new, named=its)
    assert not here.socket.exists()


def test_stale_socket(place, process):
    """The socket that a killed service left is no obstacle to the next."""
    with driver.connect() as device:
        service, engine = process(device.service_pid), process(device.engine_pid)
        service.kill()
        assert service.has_ended()
        assert engine.has_ended()
    assert "reference.sock" in place.files()
    with driver.connect() as device:
        assert device.service_pid != service.pid


@pytest.mark.parametrize("which", [0, 1], ids=["service", "engine"])
def test_killed_while_starting(place, kit, which):
    """When a starting device is killed, the client that waits for it starts another and does not notice."""
    found = []

    def connect():
        with driver.connect() as device:
            found.append((device.service_pid, device.engine_pid))

    thread = threading.Thread(target=connect)
    thread.start()
    kit.until(lambda: len(place.pids()) > which)
    pids = place.pids()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[which], signal.SIGKILL)
    thread.join(kit.patience)
    assert len(found) == 1
    if pids[which] in found[0]:
        pytest.skip("the machine is so busy that the device had started when it was killed")


def test_unknown_name(place):
    """An unknown device is told at once, with those that there are, and nothing is started."""
    with pytest.raises(driver.DeviceNotFound, match=r"'refrence'.*the devices are .*reference"):
        driver.connect("refrence")
    with pytest.raises(driver.DeviceNotFound, match=r"No module named 'nowhere'"):
        driver.connect("nowhere:Device")
    with pytest.raises(driver.DeviceNotFound, match="Nothing"):
        driver.connect("burst_test_devices.odd:Nothing")
    assert place.pids() == []
    assert place.files() == []


@pytest.mark.parametrize("name", ["Broken", "Hollow"])
def test_cannot_start(place, kit, name):
    """A device that fails to start is told with the end of its log; nothing but the log and the lock stays."""
    with pytest.raises(driver.DeviceFailed, match=r"ended while it started; its log is .*\.log") as caught:
        driver.connect(kit.odd(name))
    assert "\n    RuntimeError: this" in str(caught.value)
    assert "is broken on purpose" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 7
    for found in place.held():
        with found:
            assert found.has_ended()
    assert {p.suffix for p in place.path.iterdir()} == {".lock", ".log"}


def _absent(monkeypatch, *absent):
    """As if these wheels were not installed."""
    installed = plugins.version_of

    def version_of(wheel):
        return "none" if wheel in absent else installed(wheel)

    for module in (onnxruntime_library, wheel):
        monkeypatch.setattr(module, "version_of", version_of)


@pytest.mark.parametrize(
    ("name", "wheels"),
    [("litert", ["ai-edge-litert"]), ("onnxruntime", ["onnxruntime", "onnxruntime-gpu"])],
)
def test_not_installed(place, monkeypatch, name, wheels):
    """A device whose library is missing says so at once, with what installs it; no process is started, no log is."""
    _absent(monkeypatch, *wheels)
    install = re.escape(install_command(name))
    remedy = f"'{name}' is not installed: the device needs .*{wheels[0]} .*; {install}"
    with pytest.raises(driver.DeviceNotFound, match=remedy):
        driver.connect(name)
    (found,) = [info for info in driver.devices() if info.name == name]
    assert install_command(name) in found.missing
    assert (place.pids(), place.files()) == ([], [])


PLUGIN = """\
from driver.devices.reference import ReferenceDevice
{}
class Plugged(ReferenceDevice):
    library = "no_such_module.at_all"
"""


@pytest.mark.integration
@pytest.mark.parametrize("imports", ["", "import no_such_module.at_all"], ids=["declared", "imported"])
@pytest.mark.parametrize("extras", [[], ["plugged"]], ids=["plain", "extra"])
def test_a_third_partys_device_that_is_not_installed(place, monkeypatch, tmp_path, imports, extras):
    """The same for a device that an entry point of another package names: what is missing, the package, the remedy."""
    (tmp_path / "plugged.py").write_text(PLUGIN.format(imports))
    info = tmp_path / "some_plugin-1.0.dist-info"
    info.mkdir()
    provided = "".join(f"Provides-Extra: {name}\n" for name in extras)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n{provided}")
    (info / "entry_points.txt").write_text("[burst.devices]\nplugged = plugged:Plugged\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    with pytest.raises(driver.DeviceNotFound, match=r"'plugged' is not installed: .*no_such_module") as caught:
        driver.connect("plugged")
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    assert ("pip install 'some-plugin[plugged]'" if extras else "pip uninstall some-plugin") in str(caught.value)
    (found,) = [info for info in driver.devices() if info.name == "plugged"]
    assert "no_such_module" in found.missing
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    assert (place.pids(), place.files()) == ([], [])


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o777])
def test_open_directory_refused(place, mode):
    """A runtime directory that others can reach into is refused, and the remedy told."""
    place.path.chmod(mode)
    with pytest.raises(driver.DeviceFailed, match=r"mode 0700 that belongs to you; remove it or change its mode"):
        driver.connect()
    place.path.chmod(0o700)
    assert place.files() == []


def test_linked_directory_refused(place, monkeypatch):
    """A runtime directory that is a symbolic link, or no directory, is refused."""
    real, link, file = place.path / "real", place.path / "link", place.path / "file"
    real.mkdir(0o700)
    link.symlink_to(real)
    file.touch(0o600)
    for path in (link, file):
        monkeypatch.setenv("BURST_RUNTIME_DIR", str(path))
        with pytest.raises(driver.DeviceFailed, match=r"must be a directory"):
            driver.connect()
    assert list(real.iterdir()) == []


def test_foreign_directory_refused(place, monkeypatch):
    """A runtime directory of another user is refused."""
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(driver.DeviceFailed, match=r"belongs to you"):
        driver.connect()


def test_foreign_service_refused(place, monkeypatch):
    """A service of another user, in a directory of ours, is not talked to."""
    here = discovery.Place(place.path, "reference")
    with discovery.listen(here):
        monkeypatch.setattr("burst.channel.Channel.peer_uid", os.getuid() + 1)
        with pytest.raises(driver.DeviceFailed, match=r"belongs to another user; remove it"):
            discovery.find(here)


def test_directory_is_made(place, monkeypatch):
    """A runtime directory that does not exist is made, for its owner alone."""
    path = place.path / "a" / "b"
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(path))
    assert discovery.runtime_dir() == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    monkeypatch.delenv("BURST_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.path))
    assert discovery.runtime_dir() == place.path / "burst"


@pytest.fixture
def public(place, monkeypatch):
    """A directory in the place of /tmp, and one in the place of /var/tmp; no home, and no variable."""
    for name in ("BURST_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("TEMPORARY", "tmp"), ("STAYING", "var")):
        (place.path / folder).mkdir()
        monkeypatch.setattr(discovery, name, place.path / folder)
    (place.path / "home").mkdir()
    entry = SimpleNamespace(pw_dir=str(place.path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    found = place.path / "tmp" / f"burst-{os.getuid()}"
    yield found
    for path in (found, spare(place), place.path / "var" / f"burst-{os.getuid()}"):
        type(place)(path).clear()


def spare(place):
    return place.path / "home/.cache/burst" / f"run-{os.uname().nodename}"


def take(path, how):
    """As another account would, who may make anything in /tmp."""
    if how == "directory":
        if os.geteuid():
            pytest.skip("only root can give a directory to another account")
        path.mkdir(mode=0o700)
        os.chown(path, 12345, 12345)
    elif how == "link":
        path.symlink_to(path.parent)
    else:
        path.touch()


@pytest.mark.parametrize("how", ["directory", "link", "file"])
def test_another_account_was_faster(place, public, how):
    """When another account has made the runtime directory first, a device starts in another, and doctor says so.

    All processes find that one, also when the first is free again.
    """
    take(public, how)
    with driver.connect() as first, driver.connect() as second:
        assert first.service_pid == second.service_pid
        assert discovery.runtime_dir() == spare(place)
        notes = {finding.state: finding for finding in machine.runtime()}
        assert str(public) in notes["note"].found
        assert str(spare(place)) in notes["ok"].found
        public.rmdir() if how == "directory" else public.unlink()
        with driver.connect() as third:
            assert third.service_pid == first.service_pid
    assert not os.path.lexists(public)


def test_another_account_was_faster_everywhere(place, public):
    """Without a home, there is /var/tmp; when that is taken, too, all reasons and the remedy are told."""
    take(public, "file")
    (place.path / "home").rmdir()
    (place.path / "home").touch()
    last = place.path / "var" / f"burst-{os.getuid()}"
    assert discovery.runtime_dir() == last
    last.rmdir()
    take(last, "file")
    with pytest.raises(driver.DeviceFailed, match=rf"{public} must be.*{last} must be.*set BURST_RUNTIME_DIR to"):
        driver.connect()


def test_the_variable_of_another_user(public, place, monkeypatch):
    """XDG_RUNTIME_DIR of another account, as `su` keeps it, is not used: it would take that account's place."""
    if os.geteuid():
        pytest.skip("only root can give a directory to another account")
    other = place.path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    assert discovery.runtime_dir() == public
    assert list(other.iterdir()) == []


HOLDER = """
import os, signal, sys
from pathlib import Path
from driver.client.discovery import Place
with Place(Path(sys.argv[1]), "reference").locked() as is_ours:
    print(is_ours, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped(place, kit):
    """A process that has stopped while it holds the lock of the start."""
    with kit.python(HOLDER, place.path, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"True\n"
        os.waitpid(holder.pid, os.WUNTRACED)
        yield holder
        holder.kill()


@pytest.mark.integration
def test_a_stopped_process_holds_the_lock(place, stopped):
    """A process that was stopped (Ctrl-Z) amid a start holds up no other: they are told its pid and the remedy."""
    message = rf"process {stopped.pid} \(.*\) holds it and is stopped; continue it with `kill -CONT {stopped.pid}`"
    with pytest.raises(driver.DeviceFailed, match=message):
        driver.connect()
    (finding,) = machine.start_locks()
    assert f"process {stopped.pid} (" in finding.found
    assert place.pids() == []
    stopped.send_signal(signal.SIGCONT)
    with driver.connect() as device:
        assert device.name == "reference"


@pytest.mark.integration
def test_a_device_ends_while_a_stopped_process_holds_the_lock(place, kit, process):
    """A service whose engine has died does not wait for the lock; who connects is not kept waiting by it."""
    with driver.connect() as device:
        service, engine = process(device.service_pid), process(device.engine_pid)
        with kit.python(HOLDER, place.path, stdout=subprocess.PIPE) as holder:
            assert holder.stdout.readline() == b"True\n"
            os.waitpid(holder.pid, os.WUNTRACED)
            engine.kill()
            assert service.has_ended()
            holder.send_signal(signal.SIGCONT)
            assert holder.wait(kit.patience) == 0
    with driver.connect() as device:  # the name of the dead socket is no obstacle
        assert device.service_pid != service.pid


def test_who_holds_the_lock(place, kit):
    """The kernel says which process holds the lock; a child that was forked meanwhile does not keep it."""
    here = discovery.Place(place.path, "reference")
    assert here.holder() is None
    readable, writable = os.pipe()
    with here.locked() as is_ours:
        assert is_ours
        assert here.holder() == (os.getpid(), here.holder().command, False)
        with here.locked(0) as again:
            assert not again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            os.close(writable)
            os.read(readable, 1)
            os._exit(0)
    with here.locked(0) as is_ours:
        assert is_ours
    os.close(writable)
    os.waitpid(child, 0)
    os.close(readable)


def test_long_path(place, monkeypatch):
    """A path too long for a socket is told with the remedy, before anything is started."""
    path = place.path / ("x" * 100)
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(path))
    with pytest.raises(driver.DeviceFailed, match=r"at most 107 bytes; set BURST_RUNTIME_DIR to a shorter one"):
        driver.connect()
    assert list(path.iterdir()) == []


STRANGE_CLIENT = """
import os, resource, signal, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.umask(0)
resource.setrlimit(resource.RLIMIT_CORE, (7, resource.getrlimit(resource.RLIMIT_CORE)[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
inherited = os.open("/dev/null", os.O_RDONLY)
os.set_inheritable(inherited, True)
import driver
with driver.connect() as d:
    print(d.service_pid, d.engine_pid, flush=True)
    sys.stdin.read(1)
"""


def test_first_client_shapes_nothing(place, kit, monkeypatch):
    """What a client is like does not matter to the device that it starts: both processes begin with a clean slate."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("SECRET", "1")
    client = kit.python(STRANGE_CLIENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        assert pids == place.pids()
        for pid in pids:
            check_clean(pid, pids[0], place)
        client.stdin.write(b".")
    assert client.returncode == 0


def check_clean(pid, session, place):
    proc = Path(f"/proc/{pid}")
    assert os.getsid(pid) == session or os.getsid(pid) not in (os.getsid(0), pid)
    assert os.readlink(proc / "cwd") == "/"
    names = {line.split(b"=")[0].decode() for line in (proc / "environ").read_bytes().split(b"\0") if line}
    assert names == set(discovery.environment(place.path))
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (1, 1)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    status = dict(line.split(":\t") for line in (proc / "status").read_text().splitlines())
    assert int(status["Umask"], 8) == 0o077
    assert int(status["SigBlk"], 16) == 0
    assert os.readlink(proc / "fd" / "0") == "/dev/null"
    written = str(place.path / "reference.log") if pid == session else "pipe:["  # the service bounds the engine's
    assert all(os.readlink(proc / "fd" / fd).startswith(written) for fd in "12")
    links = {int(fd): os.readlink(proc / "fd" / fd) for fd in os.listdir(proc / "fd")}
    others = [link for fd, link in links.items() if fd > 2]
    known = ("socket:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "/memfd:", "anon_inode:[pidfd]", "pipe:[")
    assert [link for link in others if not link.startswith(known)] == []


def test_hello_of_another_version(device, shared):
    """A client of another release is refused with words, and the device lives on."""
    from burst.channel import Channel
    from driver.protocol.rpc import call

    path = shared.path / "reference.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    with Channel(sock) as channel, pytest.raises(driver.InvalidArgument, match=r"protocol 99.*same release"):
        call(channel, "hello", 99)
    device.call("free", 0)


def test_closing_twice(device):
    """close() is harmless when it is done twice, and what was made through a closed device says that it is gone."""
    device.close()
    device.close()
    with pytest.raises(ConnectionError):
        device.call("free", 0)


def test_select_is_possible(device):
    """A connection's end is an event: the socket of a killed device becomes readable."""
    poll = select.poll()
    poll.register(device._channel, select.POLLIN)
    assert poll.poll(0) == []
