"""`burst serve --group`: each account has a service and an engine of its own, behind a broker."""

import contextlib
import json
import os
import signal
import socket
from collections import Counter
from pathlib import Path

import msgpack
import older_kernel
import pytest
from click.testing import CliRunner
from served_devices import CONNECT, FRIEND, GROUP, OTHER, SERVER, Client, foreign
from slow_to_close import LINGERS
from waiting import PATIENCE, until
from worded_files import FILER

import driver
from burst import ResourceExhaustedTransient
from driver.cli.command import burst as command
from driver.doctor import running
from driver.monitor import Watcher
from driver.service.cell import nice_of

HELPERS = str(Path(__file__).parents[1])
PIDS = "out = device.service_pid, device.engine_pid"


@pytest.fixture(scope="module")
def broker(accounts):
    """A device of another account that is open to the group: the path of its socket, and its first process."""
    with foreign("--group", GROUP) as found:
        yield found


STAYS = """
from driver.client import served_sockets
from driver.client.connection import Connection
channel = served_sockets.connect({!r})
connection = Connection(channel, timeout=30)
service = connection.service_pid
connection.call("renew", "an attack", timeout=30)
while connection.call("successor", False, timeout=30)[0] != ["go"]:
    pass
"""
"""A client that has its engine renewed, and never leaves it."""


def descriptors(pid):
    """How many of each kind."""
    found = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found[os.readlink(fd).partition(":")[0]] += 1
    return found


def test_an_engine_for_each_account(members, broker):
    """Clients of one account share a service and an engine; another account, and the device's own, have others."""
    friend, other = (client.do(PIDS) for client in members)
    with Client(FRIEND, GROUP) as second, driver.connect(broker[0]) as own:
        assert second.is_ready()
        assert second.do(CONNECT.format(broker[0]), PIDS) == friend
        assert len({*friend, *other, own.service_pid, own.engine_pid, broker[1].pid}) == 7
        for pid in (*friend, *other):
            assert os.stat(f"/proc/{pid}").st_uid == SERVER


def test_an_engine_that_dies_ends_no_other(members, broker, process):
    """kill -9 of an account's engine is told to its clients alone, and its next client gets another engine. Neither
    the broker nor the engine of another account changes.
    """
    friend, other = members
    assert friend.do("burst = prepared.burst(); burst.run(X)") is None
    assert other.do("burst = prepared.burst(recover=True); burst.run(X)") is None
    before = friend.do(PIDS)
    its = process(other.do(PIDS)[1])
    its.kill()
    assert its.has_ended()
    assert other.do("prepared.run(X)").startswith("PeerDied")
    assert other.do("out = burst.run(X).outputs[0].tolist()") == [[2.0] * 4]
    assert other.do(PIDS)[1] != its.pid
    assert friend.do("out = burst.run(X).outputs[0].tolist()") == [[2.0] * 4]
    assert friend.do(PIDS) == before
    assert broker[1].poll() is None


def test_an_account_renews_its_own_engine_alone(members, broker, process):
    """Its clients go over to another cell, and no other account's notice anything."""
    friend, other = members
    assert friend.do("burst = prepared.burst(); burst.run(X)") is None
    before, others = friend.do(PIDS), other.do(PIDS)
    its = process(before[0])
    assert friend.do("out = device.connection.call('renew', 'a test')[0][1]") == "asked"
    while friend.do("out = burst.run(X).outputs[0].tolist()", PIDS) == before:
        pass
    engine = friend.do(PIDS)[1]
    policies = {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{engine}/task")}
    assert policies == {os.SCHED_OTHER}
    assert its.has_ended()
    assert friend.do("out = burst.run(X).outputs[0].tolist(), burst.stats()['recoveries']") == [[[2.0] * 4], 0]
    assert other.do(PIDS) == others
    assert broker[1].poll() is None


@pytest.mark.integration
def test_an_account_that_renews_again_and_again_has_few_cells(accounts, kit):
    """A client of each engine stays where it is, and has that renewed: more than two such engines are not kept, the
    oldest end, and another account is served.
    """
    with foreign("--group", GROUP) as (address, broker), contextlib.ExitStack() as stack:
        connections, pids = [], []
        for _ in range(6):
            connection = stack.enter_context(Client(FRIEND, GROUP))
            assert connection.is_ready()
            assert connection.do(STAYS.format(address)) is None
            pids.append(connection.do("out = service"))
            connections.append(connection)
        assert len(set(pids)) == 6
        kit.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[:3]))
        children = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
        assert len(children) <= 6
        assert accounts[1].do(CONNECT.format(address), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert accounts[1].do("device.close()") is None


def test_sighup_renews_all_engines(members, broker, process):
    """Of the broker, by the way: its own process stays."""
    before = [process(client.do(PIDS)[0]) for client in members]
    broker[1].send_signal(signal.SIGHUP)
    assert all(cell.has_ended() for cell in before)
    for client in members:
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
    assert broker[1].poll() is None


def test_the_command_renews_all_engines(members, broker, process):
    """Asked by root, and that of the device's own account, which watches the device, is among them."""
    with driver.connect(broker[0]) as own:
        before = [process(pid) for pid in (own.engine_pid, *(client.do(PIDS)[1] for client in members))]
    found = CliRunner().invoke(command, ["renew", "--json", broker[0]])
    assert {row["engine"]: row["has_ended"] for row in json.loads(found.output)} == {its.pid: True for its in before}
    assert all(its.has_ended() for its in before)
    with driver.connect(broker[0]) as own:
        assert own.engine_pid not in [its.pid for its in before]
    for client in members:
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]


@pytest.mark.integration
@pytest.mark.parametrize("which", [0, 1])
def test_a_client_that_comes_while_the_cell_ends(members, broker, process, which):
    """Whoever connects right after a cell was killed is served by the next, without an error."""
    other = members[1]
    its = process(other.do(PIDS)[which])
    its.kill()
    assert other.do(CONNECT.format(broker[0]), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
    assert other.do(PIDS)[which] != its.pid


@pytest.mark.integration
def test_a_cell_without_clients_ends(broker, accounts, process):
    """The engine of an account ends some seconds after its last client; a client that comes gets another one."""
    for _ in range(2):
        assert accounts[0].do(CONNECT.format(broker[0])) is None
        service, engine = map(process, accounts[0].do(PIDS))
        assert not engine.has_ended(0)
        assert accounts[0].do("device.close()") is None
        assert service.has_ended()
        assert engine.has_ended()


def test_the_cell_of_the_devices_own_account_is_begun_again(members, broker, process, kit):
    """When the engine of the device's own account dies, which watches the device, the broker begins another one."""
    before = members[0].do(PIDS)
    with driver.connect(broker[0]) as device:
        engine = process(device.engine_pid)
    engine.kill()
    assert engine.has_ended()
    with driver.connect(broker[0]) as device, device.prepare(kit.add_model()):
        assert device.engine_pid != engine.pid
    assert members[0].do(PIDS) == before


def test_the_broker_takes_nothing_but_the_socket(members, broker, kit):
    """Whatever a client sends, with descriptors, reaches the cell of its account: once the broker has handed over the
    last connection, it has no more descriptors than before."""
    before = descriptors(broker[1].pid)
    send = f"""
import contextlib, socket
socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(50)]
for n, sock in enumerate(socks):
    sock.connect({broker[0]!r})
    with contextlib.suppress(PermissionError):
        socket.send_fds(sock, [os.urandom(n)], [0] * 64)
"""
    assert members[1].do(send) is None
    assert members[0].do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
    kit.until(lambda: descriptors(broker[1].pid) <= before)
    assert members[1].do("[sock.close() for sock in socks]", "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]


HERD = """
import msgpack, socket
herd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range({number})]
for sock in herd:
    sock.connect(device.address)
    sock.send(msgpack.packb([7, "status"]))
"""
ANSWERS = """
out = []
for sock in herd:
    try:
        said = msgpack.unpackb(sock.recv(65536) or b"\\x90")
        out.append(said[:2])
    except OSError as error:
        out.append(str(error))
    sock.close()
out = [[answer, out.count(answer)] for answer in map(list, {tuple(each) for each in out})]
"""


def test_a_herd_that_comes_while_a_cell_begins(members, process):
    """450 clients at once are all served, though their cell, stopped here as if it began, reads none of them yet."""
    other = members[1]
    service = process(other.do(PIDS)[0])
    os.kill(service.pid, signal.SIGSTOP)
    try:
        assert other.do(HERD.format(number=450)) is None
    finally:
        os.kill(service.pid, signal.SIGCONT)
    assert other.do(ANSWERS) == [[[7, 0], 450]]


ALONE = """
import mmap, os
import numpy as np
_, fds = device.call("census")
counts = np.frombuffer(mmap.mmap(fds[0], 24, prot=mmap.PROT_READ), np.uint64)
while counts[1] > 1:
    os.sched_yield()
"""


def test_clients_that_leave_while_their_cell_stands_still(members, process):
    """They keep no places: more of them come and go than an account may have, and those that stay are served."""
    other = members[1]
    assert other.do(ALONE) is None  # the cell has noticed that the clients of the test before have left
    service = process(other.do(PIDS)[0])
    os.kill(service.pid, signal.SIGSTOP)
    try:
        for _ in range(4):
            assert other.do(HERD.format(number=300), "[sock.close() for sock in herd]") is None
        assert other.do(HERD.format(number=200)) is None
    finally:
        os.kill(service.pid, signal.SIGCONT)
    assert other.do(ANSWERS) == [[[7, 0], 200]]


REFUSED_WITH_DESCRIPTORS = """
socks, refused = [], 0
for _ in range(20):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect({address!r})
    try:
        socket.send_fds(sock, [b"x"], [slow.fileno()])
    except PermissionError:
        refused += 1
    socks.append(sock)
if refused < 20:
    import threading
    threading.Thread(target=slow.close, daemon=True).start()
for sock in socks:
    sock.close()
out = refused
"""


def is_answered(address):
    """True if a new client gets an answer in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(address)
        sock.send(msgpack.packb([7, "status"]))
        try:
            return msgpack.unpackb(sock.recv(65536))[0] == 7
        except TimeoutError:
            return False


@pytest.mark.integration
@pytest.mark.parametrize("under", [(), older_kernel.UNDER], ids=["", "older kernel"])
def test_a_descriptor_that_takes_an_hour_to_close_holds_nobody(accounts, under):
    """A socket that lingers, sent on connections that the broker refuses and closed by its sender, is closed by no
    thread that serves others: another account connects and computes. Where the kernel can, it refuses the descriptor.
    """
    limits = "uid_clients = 2\n"
    with foreign("--group", GROUP, limits=limits, under=under) as (address, broker), contextlib.ExitStack() as stack:
        hostile = stack.enter_context(Client(FRIEND, GROUP))
        assert hostile.is_ready()
        assert hostile.do(CONNECT.format(address), f"second = driver.connect({address!r})") is None
        os.kill(broker.pid, signal.SIGSTOP)
        refused = hostile.do(LINGERS, "slow, unread = lingering()", REFUSED_WITH_DESCRIPTORS.format(address=address))
        os.kill(broker.pid, signal.SIGCONT)
        assert refused == 0 if under else refused in {0, 20}
        assert is_answered(address)
        assert accounts[1].do(CONNECT.format(address), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        hostile.kill()
        assert accounts[1].do("device.close()") is None


def test_no_process_of_a_device_leaves_a_core(members, broker):
    """The broker, services and engines: a core file would have what clients gave them."""
    for pid in (broker[1].pid, *members[0].do(PIDS)):
        (line,) = (line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line)
        assert set(line.split()[4:6]) <= {"0", "1"}


def test_cells_are_for_the_devices_account_and_root(members, broker):
    """A member of the group gets no connection to another account's cell; root gets one to each."""
    assert members[0].do("out = device.call('cells', 0)") == [[0], []]
    with driver.connect(broker[0]) as device:
        (total, *uids), fds = device.call("cells", 0)
        for fd in fds:
            os.close(fd)
    assert total == 3
    assert sorted(uids) == [SERVER, FRIEND, OTHER]
    assert len(fds) == 4  # and the counts of the broker


@pytest.mark.integration
def test_limits_are_the_brokers(accounts, kit):
    """Clients beyond `uid_clients` and accounts beyond `device_accounts` are refused with the figure and the remedy."""
    with foreign("--group", GROUP, limits="uid_clients = 2\ndevice_accounts = 2\n") as (address, _):
        assert accounts[0].do(CONNECT.format(address), f"second = driver.connect({address!r})") is None
        said = accounts[0].do(f"third = driver.connect({address!r})")
        assert said.startswith("ResourceExhaustedTransient: the limit uid_clients = 2 is reached, with 2 in use")
        said = accounts[1].do(CONNECT.format(address))
        assert said.startswith("ResourceExhaustedTransient: the limit device_accounts = 2 is reached, with 2 in use")
        assert accounts[0].do("second.close()") is None
        kit.until(lambda: accounts[0].do(f"third = driver.connect({address!r})") is None)
        with driver.connect(address), driver.connect(address), pytest.raises(ResourceExhaustedTransient):
            driver.connect(address)
        assert accounts[0].do("third.close(); device.close()") is None


@pytest.mark.integration
def test_model_files_run_in_the_engine_of_their_account(accounts, process):
    """Every account runs model files, in an engine of its own. A file that ends it ends no other, and the quarantine
    is that account's: it keeps no file from another.
    """
    with foreign("--group", GROUP, device=FILER) as (address, broker):
        words = f"import sys; sys.path.insert(0, {HELPERS!r})", "from worded_files import ONE, file_model"
        for client in accounts[:2]:
            assert client.do(*words, f"device = driver.connect({address!r})") is None
            good = "good = device.prepare(file_model('good')).burst(); out = good.run(0 * ONE).outputs[0].tolist()"
            assert client.do(good) == [1] * 4
        bad = "device.prepare(file_model('one:crash')).run({})"
        before = accounts[0].do(PIDS)
        assert accounts[1].do(bad.format("ONE")).startswith("PeerDied")
        again = f"device = driver.connect({address!r})", bad.format("0 * ONE")
        assert "is quarantined on this device" in accounts[1].do(*again)
        assert accounts[0].do("out = good.run(0 * ONE).outputs[0].tolist()") == [1] * 4
        assert accounts[0].do(bad.format("0 * ONE")) is None
        assert accounts[0].do(PIDS) == before
        assert broker.poll() is None
        log = (Path(address).parents[1] / "log").read_text()
        assert f"the cell of uid {OTHER} has ended" in log
        assert "the engine ended" in log  # as the cell says through the broker
        assert os.readlink(f"/proc/{before[0]}/fd/2").startswith("pipe:")
        assert [client.do("device.close()") for client in accounts[:2]] == [None, None]


@pytest.mark.integration
def test_figures_are_of_all_accounts(accounts, process, kit):
    """Metrics and `burst top` of the device's account and root sum over all engines; a counter does not fall when one
    of these ends.
    """
    with foreign("--group", GROUP, "--metrics", "{home}/metrics.sock") as (address, _):
        for client in accounts[:2]:
            assert client.do(CONNECT.format(address), "bursts = [prepared.burst(), prepared.burst()]") is None
            assert client.do("bursts[0].run(X)", "prepared.run(X)") is None
        during = in_time(address, lambda found: found["burst_engines"] == 3)
        assert (during["burst_bursts"], during["burst_clients"]) == (4, 2)
        assert during['burst_executions_total{priority="medium"}'] >= 4
        pids = [client.do(PIDS) for client in accounts[:2]]
        held = sum(len(os.listdir(f"/proc/{engine}/fd")) for _, engine in pids)
        assert during['burst_descriptors{process="engine"}'] > held
        watcher = Watcher([address])
        kit.until(lambda: watcher.sample().devices[0].clients == 2)  # its own connection has ended
        (device,) = watcher.sample().devices
        assert (device.engines, device.bursts) == (3, 4)
        process(pids[0][1]).kill()
        assert accounts[0].do("bursts[0].run(X)").startswith("PeerDied")
        for client in accounts[:2]:
            assert client.do("device.close()") is None
        after = scraped(Path(address).parents[1] / "metrics.sock")
        for name in ("burst_executions_total", "burst_cpu_seconds_total", "burst_preparations_total"):
            for line in (line for line in during if line.startswith(name)):
                assert after[line] >= during[line], line


@pytest.mark.integration
@pytest.mark.parametrize(("lie", "engines"), [(1, 2), (2, 2), (3, 3), (4, 2), (5, 3)])
def test_an_engine_that_lies_harms_no_figures_but_its_own(accounts, lie, engines):
    """What has taken an engine over answers nonsense, pages without an end, or sends sockets in the place of traces:
    metrics and `burst top` go on with the others.
    """
    lying = ["x = again.operation('MUL', x, X, 0)"] * lie
    device = "burst_test_devices.liar:Liar"
    with foreign("--group", GROUP, "--metrics", "{home}/metrics.sock", device=device) as (address, broker):
        assert accounts[1].do(CONNECT.format(address), "burst = prepared.burst()", "burst.run(X)") is None
        begin = f"device = driver.connect({address!r})", "again = driver.ModelBuilder()"
        model = (
            "x = again.input('float32', (1, 4))",
            *lying,
            "again.output(x)",
            "prepared = device.prepare(again.build())",
        )
        assert accounts[0].do(*begin, *model) is None
        for _ in range(3):
            in_time(address, lambda found: found["burst_engines"] >= engines and found["burst_bursts"] == 1)
        assert Watcher([address]).sample().devices
        assert broker.poll() is None
        for client in accounts[:2]:
            assert client.do("device.close()") is None


def test_doctor_examines_the_engine_of_each_account(members, broker, monkeypatch):
    """`burst doctor` of root says of each engine of a served device what it has given up, and what it holds."""
    monkeypatch.setattr(running, "SERVED", Path(broker[0]).parent)
    findings = {finding.subject: finding for finding in running.devices() if broker[0] in finding.subject}
    together, found = findings[f"{broker[0]}, engines"], list(findings)
    assert (together.state, together.found) == ("note", f"3, under uid {SERVER}")
    for uid in (SERVER, FRIEND, OTHER):
        assert len([subject for subject in found if f"uid {uid}, " in subject]) == 3


def in_time(address, is_whole):
    """The metrics of a device in which no engine is missing that a busy machine kept from answering in time."""
    path, found = Path(address).parents[1] / "metrics.sock", {}
    until(lambda: found.update(scraped(path)) or is_whole(found))
    return found


def scraped(path):
    """The metrics at a socket, by their lines."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: sock.recv(1 << 16), b"")).decode()
    lines = [line for line in text.partition("\r\n\r\n")[2].splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.integration
def test_weights_are_nice_values(accounts):
    """The kernel divides the processors between cells by the weights of limits.toml, and ends those of other accounts
    first when memory runs out.
    """
    with foreign("--group", GROUP, limits=f"[weights]\n{FRIEND} = 300\n") as (address, _):
        found = []
        for client in accounts[:2]:
            assert client.do(CONNECT.format(address)) is None
            for pid in client.do(PIDS):
                group = Path(f"/proc/{pid}/autogroup")
                found.append(os.getpriority(os.PRIO_PROCESS, pid))
                assert not group.exists() or group.read_text().endswith(f"nice {found[-1]}\n")
                assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 300
            assert client.do("device.close()") is None
        with driver.connect(address) as own:
            assert int(Path(f"/proc/{own.engine_pid}/oom_score_adj").read_text()) == 0
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [min(19, own + step) for step in (0, 0, 5, 5)]


@pytest.mark.integration
def test_a_broker_that_is_nice_serves(accounts):
    """Started with a nice value, which nobody but root may lower, it adds those of the weights to its own."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, own + 7)
        with foreign("--group", GROUP) as (address, _):
            os.setpriority(os.PRIO_PROCESS, 0, own)
            assert accounts[0].do(CONNECT.format(address)) is None
            assert os.getpriority(os.PRIO_PROCESS, accounts[0].do(PIDS)[1]) == own + 7
            assert accounts[0].do("device.close()") is None
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, own)


def test_a_nice_value_stands_for_a_weight():
    """The greatest weight gets 0, and each step down a quarter more time for the others, as in the kernel."""
    assert [nice_of(uid, {}) for uid in (1, 2)] == [0, 0]
    assert [nice_of(uid, {1: 125, 2: 50}) for uid in (1, 2, 3)] == [0, 4, 1]
    assert nice_of(1, {1: 1}) == 19


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_good_order(accounts, process, number):
    """SIGTERM and Ctrl-C end the broker with 0, and all cells with it; the socket is gone."""
    with foreign("--group", GROUP) as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        pids = [process(pid) for pid in accounts[0].do(PIDS)]
        with driver.connect(address) as own:
            pids += map(process, (own.service_pid, own.engine_pid))
        os.killpg(broker.pid, number)
        assert broker.wait(PATIENCE) == 0
        assert all(each.has_ended() for each in pids)
        assert os.listdir(Path(address).parent) == ["reference.lock"]
        assert accounts[0].do("prepared.run(X)").startswith("PeerDied")
        assert accounts[0].do("device.close()") is None


def test_a_broker_that_is_killed_leaves_nothing(accounts, process):
    """kill -9 of the broker ends all cells, and their clients are told."""
    with foreign("--group", GROUP) as (address, broker):
        assert accounts[0].do(CONNECT.format(address), "burst = prepared.burst(); burst.run(X)") is None
        pids = [process(pid) for pid in accounts[0].do(PIDS)]
        broker.kill()
        assert all(each.has_ended() for each in pids)
        assert accounts[0].do("burst.run(X)").startswith("PeerDied")
        assert accounts[0].do("device.close()") is None


def test_silent_clients_hold_no_place_in_the_broker(members, broker):
    """A connection that says nothing is its cell's: the broker serves the next client at once."""
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    for sock in silent:
        sock.connect(broker[0])
    assert members[0].do("driver.connect(device.address).close()") is None
    for sock in silent:
        sock.close()


def test_what_takes_a_cell_over_reaches_nothing_else(accounts):
    """Broker and cells are confined: code in a cell's engine reaches no file of the device's account, and neither its
    service, nor the broker, nor another cell."""
    layers = {"seccomp", "no_new_privileges", "no_capabilities", "landlock_files", "landlock_signals"}
    intruder = "burst_test_devices.intruder:Intruder"
    with socket.socket(socket.AF_UNIX) as sock, foreign("--group", GROUP, device=intruder) as (address, process):
        sock.bind(f"\0{address}")
        sock.listen()
        home = Path(address).parents[1]
        secret = home / "secret"
        secret.write_text("secret")
        os.chown(secret, SERVER, SERVER)
        with driver.connect(address) as own:
            said = {"secret": str(secret), "client": process.pid, "others": [own.engine_pid, own.service_pid]}
            said |= {"abstract": address, "port": 9, "socket": str(home / "run/reference.sock")}
            assert accounts[0].do(f"driver.connect({address!r}).prepare(model).close()") is None
            states = home / ".local/state"
            said["records"] = [str(states / "burst"), f"{states}/burst-accounts", f"{states}/burst-accounts/{FRIEND}"]
            assert all(map(os.path.isdir, said["records"]))
            (home / ".config/burst/intruder.json").write_text(json.dumps(said))
            assert accounts[1].do(f"device = driver.connect({address!r})") is None
            failure = accounts[1].do("device.prepare(model)")
            assert failure.startswith("GeneralFailure: ")
            assert failure.endswith(": []")
            for active in accounts[1].do("out = device.stats()['sandbox']").values():
                assert active == dict.fromkeys(layers, True)
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert (status["Seccomp"], status["NoNewPrivs"], secret.read_text()) == ("2", "1", "secret")
        assert accounts[1].do("device.close()") is None


UNREAD = """
import msgpack, socket
bursts = [prepared.burst() for _ in range(8)]
hello, ask = msgpack.packb([0, "hello", 4]), msgpack.packb([1, "traces", 0])
socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(64)]
for sock in socks:
    sock.connect(device.address)
    sock.send(hello)
for _ in range(200):
    for sock in socks:
        try:
            sock.send(ask, socket.MSG_DONTWAIT)
        except OSError:
            pass
"""


@pytest.mark.integration
def test_answers_that_are_not_read_keep_no_descriptors_from_others(accounts, kit):
    """The kernel counts descriptors on their way by the account that sends them, which is the device's for all. An
    account that asks for many and reads no answer keeps no other one from getting its own.
    """
    with foreign("--group", GROUP, descriptors=1024) as (address, _):
        for client in accounts[:2]:
            assert client.do(CONNECT.format(address)) is None
        assert accounts[0].do(UNREAD) is None
        for _ in range(20):
            assert accounts[1].do(f"again = driver.connect({address!r}); again.prepare(model).burst().run(X)") is None
        assert accounts[0].do("[sock.close() for sock in socks]; device.close()") is None
        assert accounts[1].do("again.close(); device.close()") is None
