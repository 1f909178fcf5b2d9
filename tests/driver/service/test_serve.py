"""`burst serve`: a device under an account of its own, and clients of other accounts."""

import contextlib
import mmap
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import accounts as other_accounts
import psutil
import pytest
from click.testing import CliRunner
from served_devices import CONNECT, FRIEND, GROUP, OTHER, SERVER, SINGLE, Client, X, folder, foreign, served
from silent_file import silent_file
from waiting import PATIENCE

import driver
from burst import ErrorStatus, Request, RequestArgument
from burst.channel import close_all
from driver.cli.command import burst as command
from driver.client import discovery
from driver.engine.limits import OWN_THREADS
from driver.monitor import Watcher
from driver.runtime import capabilities
from driver.service import serve as serving
from driver.service.process import LINGER


@pytest.fixture(scope="module")
def own():
    """The socket of a device that this account serves to itself."""
    with folder() as path, served(path / "run"):
        yield str(path / "run/reference.sock")


@pytest.mark.integration
def test_connected_to_by_path(own, kit):
    """A slash makes a name the path of a socket: the device there works, on both paths, and nothing else is started."""
    with driver.connect(own) as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        assert (device.name, device.address) == ("reference", own)
        assert burst.run(X).outputs[0].tolist() == prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]
        for pid in (device.service_pid, device.engine_pid):
            assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
            assert b"burst serve\0reference" in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert f"BURST_RUNTIME_DIR={Path(own).parent}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            assert b"OPENBLAS_NUM_THREADS" in Path(f"/proc/{pid}/environ").read_bytes()


def test_pickled_by_path(own, kit):
    """A prepared model of a served device is pickled as its path, and prepared there again."""
    with driver.connect(own) as device, device.prepare(kit.add_model()) as prepared:
        again = pickle.loads(pickle.dumps(prepared))
        with again.device:
            assert again.device.service_pid == device.service_pid
            assert again.run(X)[0].tolist() == [[2, 2, 2, 2]]


def test_compiled_for_a_path(own, kit):
    """driver.compile takes paths where it takes names."""
    with driver.compile(kit.add_model(), [own]) as compiled:
        assert compiled.run(X)[0].tolist() == [[2, 2, 2, 2]]
        assert compiled.placement()[0][0] == own


def test_figures_of_paths_are_kept_apart(place):
    """Two devices whose paths differ in nothing but a slash have files of their own, in the folder of figures."""
    one, two = (driver.Capabilities({"TENSOR_INT32": driver.Performance(n)}) for n in (1.0, 2.0))
    capabilities.store("/run/a_b/c.sock", "1", one)
    capabilities.store("/run/a/b_c.sock", "1", two)
    assert capabilities.stored("/run/a_b/c.sock", "1") == one
    assert capabilities.stored("/run/a/b_c.sock", "1") == two
    assert len(list((place.path / "capabilities").iterdir())) == 2


def test_nothing_there():
    """A path where nothing is served, or nobody listens any more, is told with the remedy; nothing is started."""
    with folder() as path:
        here = discovery.Place(path, "reference")
        for missing in (here.socket, path / "missing" / "x.sock"):
            with pytest.raises(driver.DeviceNotFound, match=f"{missing}.*no device is served there; .*burst serve"):
                driver.connect(str(missing))
        discovery.listen(here).close()
        with pytest.raises(driver.DeviceFailed, match="no device listens there any more; start it again"):
            driver.connect(str(here.socket))
        assert [p.name for p in path.iterdir()] == ["reference.sock"]


def test_relative_path():
    """The path of a socket is absolute, so that it means the same to every process."""
    with pytest.raises(driver.DeviceNotFound, match=f"is absolute; use '{os.getcwd()}/run/x.sock'"):
        driver.connect("./run/x.sock")


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_folder_of_others_not_trusted(mode):
    """A client does not connect where others could have put the socket: in the folder, or instead of it."""
    with folder() as path, discovery.listen(discovery.Place(path, "x")):
        path.chmod(mode)
        with pytest.raises(driver.DeviceFailed, match=f"{path}: others may write to it.*chmod go-w {path}"):
            driver.connect(str(path / "x.sock"))
        (path / "below").mkdir()
        is_sticky = mode & stat.S_ISVTX  # what is in it belongs to its owners
        with pytest.raises(driver.DeviceNotFound if is_sticky else driver.DeviceFailed):
            driver.connect(str(path / "below" / "x.sock"))


def test_another_listener_not_trusted(monkeypatch):
    """A client talks to the owner of the folder alone."""
    with folder() as path, discovery.listen(discovery.Place(path, "x")):
        monkeypatch.setattr("burst.channel.Channel.peer_uid", os.getuid() + 1)
        with pytest.raises(
            driver.DeviceFailed, match=f"uid {os.getuid() + 1} listens in a folder of uid {os.getuid()}"
        ):
            driver.connect(str(path / "x.sock"))


# ---- refusals of the command


@pytest.fixture
def refused(monkeypatch):
    """Calls `burst serve` in this process, which it does not become: the error that it exits with."""
    monkeypatch.setattr(serving, "_become", lambda *_, **__: pytest.fail("it was not refused"))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    umask = os.umask(0)

    def call(*words):
        result = CliRunner().invoke(command, ["serve", *map(str, words)])
        assert result.exit_code == 2, result.output
        return result.stderr

    yield call
    os.umask(umask)


def test_refuses_names(refused):
    """An unknown device or group, or a path too long for a socket, is told with the remedy; nothing is left behind."""
    with folder() as path:
        assert "'refrence': no such device" in refused("refrence", "--dir", path / "run")
        assert "no such group; make it with" in refused("reference", "--group", "no-such", "--dir", path / "run")
        assert "at most 107 bytes; use a shorter --dir" in refused("reference", "--dir", path / ("x" * 90))
        (path / ("x" * 90)).rmdir()
        assert list(path.iterdir()) == []


def test_refuses_folders(refused):
    """A folder that cannot be made, that others may enter or write to, or that the group may not enter, is refused."""
    with folder() as path:
        run = path / "run"
        assert "cannot make it (No such file or directory)" in refused("reference", "--dir", run / "below")
        run.touch()
        assert "must be a folder" in refused("reference", "--dir", run)
        run.unlink()
        run.mkdir()
        for mode in (0o755, 0o701):
            run.chmod(mode)
            assert f"mode {mode:04o}: chmod 0750 it" in refused("reference", "--dir", run)
        run.chmod(0o770)
        assert f"{run}: others may write to it" in refused("reference", "--dir", run)
        run.chmod(0o700)
        assert f"chgrp {GROUP} {run} && chmod 0750" in refused("reference", "--group", GROUP, "--dir", run)
        path.chmod(0o775)
        assert f"{path}: others may write to it" in refused("reference", "--dir", run)
        assert list(run.iterdir()) == []


MASKS = """
import os, sys
from pathlib import Path
import numpy  # and the threads of its linear algebra
from driver.service.serve import serve

def tell(*_):
    for status in Path("/proc/self/task").glob("*/status"):
        print(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigBlk")))
    sys.stdout.flush()
    os._exit(0)

serve("reference", Path(sys.argv[1]), tell=tell)
"""


def test_it_can_be_ended_as_soon_as_it_tells_where_it_is():
    """A signal that comes before the service can take it waits: no thread lets it end the process, with its socket."""
    with folder() as path:
        said = subprocess.check_output([sys.executable, "-c", MASKS, path / "run"], text=True)
    both = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    assert {int(mask, 16) & both for mask in said.split()} == {both}


@pytest.mark.integration
def test_tells_programs_where_it_is_served():
    """--json: one line, when clients may connect, and nothing after it."""
    with (
        folder() as path,
        served(path / "run", "--json", says='{{"device": "{device}", "socket": "{socket}", "metrics": null}}') as its,
    ):
        with driver.connect(f"{path}/run/reference.sock") as device:
            assert device.name == "reference"
        its.terminate()
        assert its.stdout.read() == b""


def test_refuses_what_is_served(refused, own, kit):
    """A device that is served there already stays, undisturbed."""
    assert "'reference' is already served there; stop that service" in refused("reference", "--dir", Path(own).parent)
    with driver.connect(own) as device, device.prepare(kit.add_model()) as prepared:
        assert prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]


# ---- life and death


@pytest.mark.integration
def test_stays_without_clients(own, process):
    """A served device does not end when nobody needs it."""
    with driver.connect(own) as device:
        service = process(device.service_pid)
    assert not service.has_ended(LINGER + 0.2)
    with driver.connect(own) as device:
        assert device.service_pid == service.pid


def test_started_again_by_others(process, kit, monkeypatch):
    """A burst that recovers waits for whoever serves the device to start it again, but not for ever.

    SIGTERM ends a served device in good order, and its socket is gone.
    """
    with folder() as path:
        run, address = path / "run", str(path / "run/reference.sock")
        with served(run) as first, driver.connect(address) as device:
            prepared = device.prepare(kit.add_model())
            burst = prepared.burst(recover=True)
            assert burst.run(X).outputs[0].tolist() == [[2, 2, 2, 2]]
            engine = process(device.engine_pid)
            first.kill()
            assert engine.has_ended()
            assert "reference.sock" in os.listdir(run)
            future = burst.submit(X)
            with served(run) as second:
                assert future.result(kit.patience).outputs[0].tolist() == [[2, 2, 2, 2]]
                assert device.service_pid == second.pid
                engine = process(device.engine_pid)
                second.send_signal(signal.SIGTERM)
                assert second.wait(kit.patience) == 0
                assert engine.has_ended()
            assert os.listdir(run) == ["reference.lock"]
            monkeypatch.setattr("driver.client.device._PATIENCE", 0.0)
            with pytest.raises(driver.DeviceFailed, match=r"did not come back within 0 s: .*no device is served there"):
                burst.run(X)
            with pytest.raises(ConnectionError):
                prepared.run(X)


@pytest.mark.parametrize("options", [(), ("--group", str(os.getgid()))], ids=["", "for a group"])
def test_it_ends_where_its_folder_is_gone(options):
    """SIGTERM ends a device whose folder somebody has deleted: there is no lock to take, and nothing to leave."""
    with folder() as path, served(path / "run", *options) as process:
        assert b"is ready" in process.stdout.readline()
        shutil.rmtree(path / "run")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == b""


# ---- accounts


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("device", ["reference", "litert", "onnxruntime", "openvino"])
def test_a_signal_to_the_group_ends_it_without_a_word(device, number):
    """Ctrl-C and systemd signal all processes of the device, and may do so twice: status 0, and nothing is printed."""
    with folder() as path, served(path / "run", device=device) as process:
        assert b"is ready" in process.stdout.readline()
        before = (path / "log").read_text()  # what runtimes say when they are loaded
        with driver.connect(f"{path}/run/{device}.sock") as remote:
            engine = remote.engine_pid
        for child in psutil.Process(process.pid).children():
            if child.pid != engine:
                child.send_signal(number)  # before the service ends, which ends them
        os.killpg(process.pid, number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == b""
        assert (path / "log").read_text() == before


@pytest.fixture(scope="module", params=["reference", SINGLE], ids=["engines", "one engine"])
def for_group(accounts, request):
    """The socket of a device of another account, which is open to the group: with an engine for each account, and with
    one for all of them.
    """
    with foreign("--group", GROUP, device=request.param) as (address, _):
        yield address


@pytest.fixture(scope="module")
def single(accounts):
    """The same, with one engine."""
    with foreign("--group", GROUP, device=SINGLE) as (address, _):
        yield address


@pytest.fixture
def members(accounts, for_group):
    """The friend and the other, with a model prepared on that device."""
    for client in accounts[:2]:
        assert client.do(CONNECT.format(for_group)) is None
    yield accounts[:2]
    for client in accounts[:2]:
        assert client.do("device.close()") is None


@pytest.mark.integration
def test_modes(for_group):
    """A device for a group has a folder of 0750 and a socket of 0660, both the account's and that group's."""
    found = [os.stat(path) for path in (Path(for_group).parent, for_group)]
    assert [stat.S_IMODE(status.st_mode) for status in found] == [0o750, 0o660]
    assert {(status.st_uid, status.st_gid) for status in found} == {(SERVER, GROUP)}


@pytest.mark.integration
def test_both_processes_are_the_accounts(for_group):
    """Service and engine run under that account, with its home: no client's, and not root's."""
    with driver.connect(for_group) as device:
        for pid in (device.service_pid, device.engine_pid):
            assert os.stat(f"/proc/{pid}").st_uid == SERVER
            assert f"HOME={Path(for_group).parents[1]}".encode() in Path(f"/proc/{pid}/environ").read_bytes()


def test_members_of_the_group_are_served(members):
    """Accounts in the group run models on the plain path and in bursts at the same time."""
    for client in members:
        assert client.do("burst = prepared.burst()") is None
    for client in members:
        run = "out = [prepared.run(X)[0].tolist(), burst.run(X).outputs[0].tolist(), burst.stats()['runs']['burst']]"
        assert client.do(run) == [[[2.0] * 4], [[2.0] * 4], 1]
        assert client.do("out = burst.stats()['cpu_seconds']['device'] > 0") is True


def test_others_are_not(accounts, for_group):
    """Who is not in the group is told what is missing."""
    assert "uid 61004 may not connect; serve the device with --group, and add your account to that group" in (
        accounts[2].do(f"driver.connect({for_group!r})")
    )


def test_nobody_names_what_is_anothers(accounts, single):
    """Prepared models and buffers belong to a connection: another account that says their numbers is refused."""
    friend, other = accounts[:2]
    assert [client.do(CONNECT.format(single)) for client in (friend, other)] == [None, None]
    allocate = "mine = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])"
    number, token = friend.do("again = device.prepare(model)", allocate, "out = [again.home.number, mine.token]")
    assert other.do(allocate) is None
    none = f"InvalidArgument: prepared model {number}: this client has none with that number"
    assert none in other.do(f"device.call('allocate', (), [{number}], [[0, 0, 1.0]], [])")
    assert none in other.do(f"prepared.remote.home = prepared.home._replace(number={number}); prepared.run(X)")
    assert none in other.do("prepared.burst()")
    assert f"token {token}: no buffer of this client" in other.do(f"mine.token = {token}; mine.copy_from(X)")
    assert f"token {token}: no buffer of this client" in other.do(f"device.call('release', {token})")
    assert other.do(f"device.call('free', {number})") is None
    use = "mine.copy_from(X); Y = 0 * X; mine.copy_to(Y); out = [again.run(X)[0].tolist(), Y.tolist()]"
    assert friend.do(use) == [[[2.0] * 4], [[1.0] * 4]]


WAYS_IN = {
    "plain": "prepared.execute(request).raise_for_status()",
    "burst": "burst.execute(request).raise_for_status()",
    "async": "prepared.execute_async(request).result(20).raise_for_status()",
    "fenced": "prepared.execute_fenced(request).wait(20)",
    "copies": "mine.copy_from(pool); mine.copy_to(pool)",
}


def test_memory_of_another_account_has_all_its_pages(members):
    """On each way into the device a client hands over memory that it has hardly touched, and its library makes the
    missing pages; holes that come in spite of that are refused, and cost the device nothing.
    """
    friend, other = members
    start = "burst = prepared.burst(); from burst import Memory, Request, RequestArgument as A"
    allocate = "mine = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])"
    make = "pool = Memory.create({}); pool.asarray()[:1] = 0"
    whole = "request = Request((A(length=16),), (A(offset=1 << 16, length=16),), (pool,))"
    for name, use in WAYS_IN.items():
        size = 16 if name == "copies" else 1 << 20
        assert friend.do(start, allocate, make.format(size), whole, use) is None, name
        assert friend.do("out = os.fstat(pool.fd).st_blocks * 512") == max(4096, size), name
    keep = "; ".join(f"kept_{n} = sys.modules[{m!r}].{name}" for n, (m, name, _) in enumerate(FILLING))
    skip = "; ".join(f"sys.modules[{m!r}].{name} = {without}" for m, name, without in FILLING)
    again = "; ".join(f"sys.modules[{m!r}].{name} = kept_{n}" for n, (m, name, _) in enumerate(FILLING))
    assert other.do(keep) is None
    before = shared_bytes(other)
    for name, use in WAYS_IN.items():
        size = 1 << 20 if name == "copies" else 1 << 31
        found = other.do(skip, start, allocate, make.format(size), whole, use)
        assert "InvalidArgument" in found, (name, found)
    assert shared_bytes(other) - before < 1 << 20
    assert other.do(again) is None


FILLING = [
    ("driver.client.remote_executor", "Accepted", "lambda version, life, _: kept_0(version, life)"),
    ("driver.client.lane_socket", "fill_holes", "lambda _: None"),
    ("driver.client.device_buffers", "fill_holes", "lambda _: None"),
]


def shared_bytes(client):
    """Shared memory that the client's engine has touched."""
    (line,) = [row for row in client.do(ENGINE_STATUS).splitlines() if row.startswith("RssShmem")]
    return 1024 * int(line.split()[1])


ENGINE_STATUS = "out = open(f'/proc/{device.engine_pid}/status').read()"


AGAIN = "with device.prepare(model) as fresh, fresh.burst() as burst: out = burst.run(X).outputs[0].tolist()"


def test_a_file_that_does_not_answer_holds_its_own_account_alone(members, for_group, kit):
    """One account, here root's, hands over a file of FUSE that answers neither reads nor its close: the executions and
    preparations of another one go on, in the same process as before.
    """
    if not os.path.exists("/dev/fuse"):
        pytest.skip("the kernel has no FUSE")
    honest = members[0]
    engine = honest.do("out = device.engine_pid")
    with (
        folder() as path,
        silent_file(path) as silent,
        driver.connect(for_group) as device,
        contextlib.ExitStack() as use,
    ):
        prepared = use.enter_context(device.prepare(kit.add_model()))
        burst, ended = use.enter_context(prepared.burst()), []
        fd = os.open(silent, os.O_RDWR)
        arguments = (RequestArgument(length=16),), (RequestArgument(offset=16, length=16),)
        request = Request(*arguments, (driver.Memory.from_fd(fd, 4096),))
        for execute in (burst.execute, prepared.execute):
            hand_over = partial(lambda execute: ended.append(execute(request).status), execute)
            threading.Thread(target=hand_over, daemon=True).start()
        silent.await_asked("FLUSH")
        for _ in range(3):
            assert honest.do(AGAIN) == honest.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert honest.do("out = device.engine_pid") == engine
        assert not ended
        silent.server.kill()
        kit.until(lambda: len(ended) == 2)
        assert set(ended) == {ErrorStatus.GENERAL_FAILURE}
        close_all([fd])


def test_what_accounts_hold_is_their_own(accounts, single, for_group):
    """An account sees what it holds itself; root sees what all hold, in one engine or in several."""
    read = "import driver.protocol.ledger_report as l; rows = l.LedgerReport.read(device.call, {!r}).rows"
    for address in (single, for_group):
        for client, uid in zip(accounts[:2], (FRIEND, OTHER), strict=True):
            assert client.do(CONNECT.format(address)) is None
            for process in ("engine", "service"):
                assert client.do(read.format(process), "out = [*{row.uid for row in rows}]") == [uid]
        (device,) = Watcher([address], with_accounts=True).sample().devices
        assert {account.uid for account in device.accounts} >= {FRIEND, OTHER}


@pytest.mark.integration
def test_one_account_takes_all_the_life_words_that_it_may(accounts):
    """It is refused with the figure, and others have plain paths, bursts and answers as before."""
    friend, other = accounts[:2]
    with foreign("--group", GROUP, device=SINGLE) as (address, _):
        assert friend.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); held = []") is None
        assert other.do(CONNECT.format(address)) is None
        take = (
            f"devices = [driver.connect({address!r}) for _ in range(17)]",
            "for device in devices:",
            "    held += [device.call('lane')[1] for _ in range(120)]",
        )
        assert "% of account_life_words = " in friend.do(*take)
        assert friend.do("out = 500 < len(held) < 1000") is True
        assert other.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert other.do("burst = prepared.burst(); out = burst.run(X).outputs[0].tolist()") == [[2.0] * 4]
        assert friend.do("[os.close(fd) for fds in held for fd in fds]; [device.close() for device in devices]") is None


def test_a_file_of_another_account_is_read(members, for_group, kit, tmp_path):
    """A file on a disk is an input for another account's device, whatever confines that; it is copied."""
    (tmp_path / "file").write_bytes(X.tobytes())
    with driver.connect(for_group) as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        with open(tmp_path / "file", "rb") as file:
            pools = driver.Memory.from_fd(file.fileno(), 16, mmap.PROT_READ), driver.Memory.create(16)
        request = Request((RequestArgument(length=16),), (RequestArgument(pool=1, length=16),), pools)
        for execute in (burst.execute, prepared.execute):
            execute(request).raise_for_status()
            assert pools[1].asarray(X.dtype).tolist() == [2] * 4
            pools[1].asarray()[:] = 0


def test_notes_are_of_the_own_account(members, for_group):
    """An account sees the traces of its own bursts; root sees all, also those that their owner has locked."""
    for client in members:
        assert client.do("bursts = [prepared.burst(), prepared.burst()]") is None
    assert members[0].do("os.fchmod(bursts[0]._session.controller.trace.memory.fd, 0)") is None
    with driver.connect(for_group) as device:
        assert len(device.traces()) == 4
    for client in members:
        assert client.do("out = [trace.page.client.pid == os.getpid() for trace in device.traces()]") == [True] * 2


def test_who_looks_on_sees_their_own_account(members, for_group):
    """What `burst top` reads has the bursts and clients of one account, whatever others do; root's has all."""
    look = "sample = watcher.sample(); out = [len(sample.bursts), sample.devices[0].bursts]"
    for client in members:
        assert client.do(f"from driver.monitor import Watcher; watcher = Watcher([{for_group!r}])", look) == [0, 0]
    assert members[0].do("bursts = [prepared.burst(), prepared.burst()]") is None
    assert Watcher([for_group]).sample().devices[0].bursts == 2
    assert members[1].do(look) == [0, 0]
    unchanged = "next(iter(watcher.devices)).changes"
    assert members[1].do(f"out = {unchanged}") == 0
    assert members[0].do("watcher = Watcher(watcher._addresses)", look) == [2, 2]
    assert members[0].do("[burst.close() for burst in bursts]") is None


@pytest.mark.integration
def test_a_killed_client_leaves_nothing(members, for_group, kit):
    """kill -9 of another account's client ends its bursts on the device, and nobody else notices."""
    friend = members[0]
    assert friend.do("burst = prepared.burst()") is None
    with Client(OTHER, GROUP) as victim, driver.connect(for_group) as device:
        kit.until(lambda: len(device.traces()) == 1)  # those of other tests have ended
        assert victim.is_ready()
        assert victim.do(CONNECT.format(for_group), "burst = prepared.burst(); burst.run(X)") is None
        assert len(device.traces()) == 2
        victim.kill()
        kit.until(lambda: len(device.traces()) == 1)
    assert friend.do("out = burst.run(X).outputs[0].tolist()") == [[2.0] * 4]


def test_queues_that_can_be_truncated_are_for_the_devices_own_account(members, for_group):
    """A member of the group cannot open a burst on unsealed memory, nor on POSIX shared memory, which has no
    seals: it could truncate that under the device's threads. It is told what to do, and on a memfd it can.
    """
    said = members[0].do(f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})", "import unsealed", TRUNCATES)
    assert "not sealed against shrinking" in said
    said = members[0].do("prepared.burst(memory='posix')")
    assert 'opens it with memory="memfd"' in said
    assert members[0].do("out = prepared.burst().run(X).outputs[0].tolist()") == [[2.0] * 4]


TRUNCATES = "unsealed.truncate_queues(prepared)"


def test_its_own_account_alone(accounts):
    """Without --group the folder is closed, and even root, who can enter it, is not served."""
    with foreign() as (address, process):
        assert stat.S_IMODE(Path(address).parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(os.stat(address).st_mode) & 0o077 == 0
        assert "uid 61002 may not connect" in accounts[0].do(f"driver.connect({address!r})")
        with pytest.raises(driver.DeviceFailed, match="it ended, or does not serve uid 0"):
            driver.connect(address)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        assert process.wait(PATIENCE) == 0
        assert os.listdir(Path(address).parent) == ["reference.lock"]


@pytest.mark.integration
def test_only_to_a_group_of_ones_own(accounts):
    """An account that is not in the group cannot serve it: it is told so, and leaves no folder behind."""
    with folder() as path:
        os.chown(path, SERVER, SERVER)
        words = [
            sys.executable,
            "-m",
            "driver.cli",
            "serve",
            "reference",
            "--dir",
            f"{path}/run",
            "--group",
            str(GROUP),
        ]
        words = other_accounts.words_as(SERVER, (), words)
        done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=PATIENCE, check=False)
        assert done.returncode == 2
        assert f"uid {SERVER} is not a member of that group" in " ".join(done.stderr.split())
        assert os.listdir(path) == []


def test_a_folder_of_another_is_not_trusted(accounts):
    """Somebody who can put a socket into the folder of another is not talked to."""
    with folder() as path, discovery.listen(discovery.Place(path, "x")):
        os.chown(path, SERVER, SERVER)
        (path / "x.sock").chmod(0o666)
        assert f"uid 0 listens in a folder of uid {SERVER}" in accounts[0].do(
            f"driver.connect({str(path / 'x.sock')!r})"
        )


def test_a_device_that_dies(accounts):
    """kill -9 of the engine ends what clients of any account wait for, and the command with 1: it can be restarted."""
    with foreign("--group", GROUP, device=SINGLE) as (address, process):
        for client in accounts[:2]:
            assert client.do(CONNECT.format(address), "burst = prepared.burst(); burst.run(X)") is None
        with driver.connect(address) as device:
            os.kill(device.engine_pid, signal.SIGKILL)
        for client in accounts[:2]:
            assert client.do("burst.run(X)").startswith("PeerDied")
            assert client.do("prepared.run(X)").startswith("PeerDied")
        assert process.wait(PATIENCE) == 1
        assert os.listdir(Path(address).parent) == [Path(address).name.replace(".sock", ".lock")]


FILES = """
def files(*contents):
    found = [os.memfd_create("cache") for _ in range(sum(device.number_of_cache_files_needed()))]
    for fd, content in zip(found, contents):
        os.pwrite(fd, bytes.fromhex(content), 0)
    return found

def kept(fds, token=b"t" * 32):
    return driver.Cache(token, [], fds)
"""
RESTORED = "out = device.prepare_from_cache(model, kept(fds)).run(X)[0].tolist()"


def test_a_device_loads_what_it_has_written_for_that_account(members, for_group):
    """A client of another account cannot make it load bytes of its making: not its own files when it has changed them,
    not another account's, and neither the key nor the records are within its reach.
    """
    friend, other = members
    for client in members:
        assert client.do(FILES, "fds = files()") is None
    keep = "out = device.prepare(model, cache=kept(fds)).home.declined"
    assert friend.do(keep) == ""
    assert friend.do(RESTORED) == [[2.0] * 4]
    read = "out = [os.pread(fd, os.fstat(fd).st_size, 0).hex() for fd in fds]"
    contents = friend.do(read)
    assert "has no record of writing them" in other.do(f"fds = files(*{contents!r})", RESTORED)
    assert other.do("fds = files()", keep) == ""
    assert other.do(read) == contents  # the same model: what the device does not accept is the account
    assert other.do("os.pwrite(fds[0], b'!', 3)") is None
    assert "changed since the device wrote them" in other.do(RESTORED)
    assert friend.do(RESTORED) == [[2.0] * 4]
    state = Path(for_group).parents[1] / ".local/state/burst"
    assert state.stat().st_uid == SERVER
    for client in members:
        assert "PermissionError" in client.do(f"os.listdir({str(state)!r})")


FILE = """
sys.path.insert(0, {folder!r})
import worded_files
file = worded_files.file_model("good")
out = device.explain(file)
"""
NOT_YOURS = "runs model files for its own account alone"


@pytest.mark.integration
def test_model_files_are_for_the_devices_own_account(accounts):
    """A device with one engine runs model files for its own account. Another is told why, and what to do instead."""
    with foreign("--group", GROUP, device=f"{SINGLE.partition(':')[0]}:Filer") as (address, _):
        use = f"device = driver.connect({address!r})", FILE.format(folder=str(Path(__file__).parents[1]))
        (reason,) = accounts[0].do(*use)
        assert NOT_YOURS in reason
        assert 'form="operations"' in reason
        assert NOT_YOURS in accounts[0].do("device.prepare(file)")
        assert accounts[0].do("out = device.extensions, device.close()") == [[], None]
        with Client(SERVER, GROUP) as its_own:
            assert its_own.is_ready()
            assert its_own.do(*use) == [None]
            assert its_own.do("out = device.prepare(file).run(0 * X[0])[0].tolist()") == [1] * 4


def test_model_files_of_others_may_be_allowed(accounts):
    """With --files-of-others a device with one engine runs the model files of all accounts."""
    options = "--group", GROUP, "--files-of-others"
    with foreign(*options, device=f"{SINGLE.partition(':')[0]}:Filer") as (address, _):
        use = f"device = driver.connect({address!r})", FILE.format(folder=str(Path(__file__).parents[1]))
        assert accounts[0].do(*use) == [None]
        assert accounts[0].do("out = device.prepare(file).run(0 * X[0])[0].tolist(), device.close()") == [[1] * 4, None]


@pytest.mark.integration
def test_threads_that_a_runtime_starts_are_their_accounts(accounts):
    """On an engine that accounts share, models with more threads than one account may have are refused to it alone."""
    options, most = ("--group", GROUP, "--files-of-others"), 16
    device = f"{SINGLE.partition(':')[0]}:Filer"
    with foreign(*options, device=device, limits=f"account_threads = {most}\n") as (address, _):
        words = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})", "from worded_files import *"
        for client in accounts[:2]:
            assert client.do(*words, f"device = driver.connect({address!r})", "models = []") is None
        load = "for n in range({}): models.append(device.prepare(file_model(f'load:threads {{n}}')))"
        refused = accounts[0].do(load.format(2 + (most + OWN_THREADS) // 16))
        assert "this account has in the device's engine" in refused
        assert "its runtime has started for models" in refused
        assert accounts[1].do(load.format(2)) is None
        assert [client.do("device.close()") for client in accounts[:2]] == [None, None]
