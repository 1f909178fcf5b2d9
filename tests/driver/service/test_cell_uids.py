"""`burst serve --group --uids`: the cell of each other account has a uid of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import accounts as other_accounts
import pytest
from click.testing import CliRunner
from served_devices import CONNECT, FRIEND, GROUP, OTHER, SERVER, Client, folder, foreign, served, with_capabilities
from waiting import PATIENCE
from worded_files import FILER

import driver
from driver.cli.command import burst as command
from driver.doctor import running
from driver.errors import DeviceFailed
from driver.service.cell_uids import uids_in

FIRST, SECOND, LAST = 720000, 720001, 720008
UIDS = "--group", GROUP, "--uids", f"{FIRST}-{LAST}"
NEEDED = "setuid", "setgid", "kill"
HELPERS = str(Path(__file__).parents[1])
PIDS = "out = device.service_pid, device.engine_pid"


@pytest.fixture(scope="module")
def broker(accounts):
    """Such a device, under an account with the three capabilities: the path of its socket, and its first process."""
    with foreign(*UIDS, capabilities=NEEDED, limits="client_bursts = 1\n") as found:
        yield found


@pytest.fixture
def members(accounts, broker):
    """The friend and the other, with a model prepared on that device."""
    for client in accounts[:2]:
        assert client.do(CONNECT.format(broker[0])) is None
    yield accounts[:2]
    for client in accounts[:2]:
        assert client.do("device.close()") is None


def status(pid):
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def homes(address):
    return Path(address).parents[1] / ".local/state/burst-cells"


@pytest.mark.integration
def test_each_cell_has_a_uid_of_its_own(members, broker):
    """Both processes of a cell have one uid and gid of the range, no other group and no capability; the broker and the
    cell of the device's own account have that account's, and the broker the three capabilities that it needs.
    """
    for client, uid in zip(members, (FIRST, SECOND), strict=True):
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        for pid in client.do(PIDS):
            found = status(pid)
            assert (found["Uid"].split(), found["Gid"].split()) == ([str(uid)] * 4, [str(uid)] * 4)
            assert (found["Groups"].split(), int(found["CapPrm"], 16), int(found["CapInh"], 16)) == ([], 0, 0)
        assert all(all(layers.values()) for layers in client.do("out = device.stats()['sandbox']").values())
    with driver.connect(broker[0]) as own:
        for pid in (own.service_pid, own.engine_pid, broker[1].pid):
            assert status(pid)["Uid"].split() == [str(SERVER)] * 4
        assert [int(status(pid)["CapPrm"], 16) for pid in (own.service_pid, own.engine_pid)] == [0, 0]
    (line,) = Path(f"/proc/{broker[1].pid}/task/{broker[1].pid}/children").read_text().splitlines()
    assert {int(status(pid)["CapPrm"], 16) for pid in line.split()} == {0}  # that which closes sockets, too
    assert int(status(broker[1].pid)["CapPrm"], 16) == 0b111 << 5


ATTACKS = """
import os, signal, sys
for pid in map(int, sys.argv[1].split(",")):
    for name, attack in {
        "signal": lambda: os.kill(pid, 0),
        "slow down": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "limit": lambda: __import__("resource").prlimit(pid, 7, (1, 1)),
        "read the memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "read the environment": lambda: open(f"/proc/{pid}/environ", "rb").read(),
        "list the descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
    }.items():
        try:
            attack()
            print(name, pid)
        except PermissionError:
            pass
for home in sys.argv[2:]:
    try:
        print(os.listdir(home))
    except PermissionError:
        pass
try:
    os.mkdir(os.path.dirname(home) + "/1")
    print("made a home")
except PermissionError:
    pass
"""


@pytest.mark.integration
def test_the_kernel_keeps_cells_apart_without_their_sandboxes(members, broker):
    """A process that has the uid of a cell and none of its confinement acts on no other cell, nor on the broker, and
    reaches no other account's records; on its own cell it does.
    """
    friend, other = (client.do(PIDS) for client in members)
    with driver.connect(broker[0]) as own:
        others = *other, broker[1].pid, own.engine_pid, own.service_pid
    places = homes(broker[0]) / str(OTHER), homes(broker[0])

    def attacked(pids):
        words = other_accounts.python_as(FIRST, (), ATTACKS, ",".join(map(str, pids)), *places)
        return subprocess.check_output(words, cwd="/", text=True)

    assert attacked(others) == ""
    assert "signal" in attacked(friend)


@pytest.mark.integration
def test_what_takes_a_cell_over_reaches_nothing_else(accounts):
    """Code in a cell's engine reaches no file of the device's account, neither its service nor another process of the
    device, and not the records of its own account's service."""
    intruder = "burst_test_devices.intruder:Intruder"
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        address, process = stack.enter_context(foreign(*UIDS, device=intruder, capabilities=NEEDED))
        sock.bind(f"\0{address}")
        sock.listen()
        home = Path(address).parents[1]
        secret = home / "secret"
        secret.write_text("secret")
        os.chown(secret, SERVER, SERVER)
        own = stack.enter_context(driver.connect(address))
        said = {"secret": str(secret), "client": process.pid, "others": [own.engine_pid, own.service_pid]}
        said |= {"abstract": address, "port": 9, "socket": str(home / "run/reference.sock")}
        assert accounts[0].do(CONNECT.format(address)) is None
        said["others"] += accounts[0].do(PIDS)
        said["records"] = [str(homes(address)), str(homes(address) / str(FRIEND)), str(home / ".local/state/burst")]
        assert all(map(os.path.isdir, said["records"]))
        (home / ".config/burst/intruder.json").write_text(json.dumps(said))
        assert accounts[1].do(f"device = driver.connect({address!r})") is None
        failure = accounts[1].do("device.prepare(model)")
        assert failure.startswith("GeneralFailure: ")
        assert failure.endswith(": []")
        assert [client.do("device.close()") for client in accounts[:2]] == [None, None]


@pytest.mark.integration
def test_the_configuration_of_the_device_holds_for_each_cell(members, broker):
    """limits.toml of the device's account, which the cell's uid cannot read, limits its clients, and is named."""
    said = members[0].do("bursts = [prepared.burst() for _ in range(2)]")
    assert said.startswith("ResourceExhaustedTransient: the limit client_bursts = 1 is reached")
    assert f"in {Path(broker[0]).parents[1]}/.config/burst/limits.toml and restart" in said


@pytest.mark.integration
def test_figures_and_doctor_see_all_cells(members, broker, monkeypatch):
    """Root asks each cell for the figures of all its clients, of its processes too; `burst doctor` finds one uid for
    each engine.
    """
    monkeypatch.setattr(running, "SERVED", Path(broker[0]).parent)
    with driver.connect(broker[0]):
        findings = {found.subject: found for found in running.devices() if broker[0] in found.subject}
    together = findings[f"{broker[0]}, engines"]
    assert (together.state, together.found) == ("ok", f"3, under uid {SERVER}, {FIRST}, {SECOND}")
    for uid in (FRIEND, OTHER):
        held = findings[f"{broker[0]}, uid {uid}, what accounts hold"]
        assert (held.state, f"uid {uid}" in held.found) == ("ok", True)


@contextlib.contextmanager
def again(path, *options, device="reference"):
    """That device in a folder of the account's, which may have served before; its socket."""
    os.chown(path, SERVER, SERVER)
    under = with_capabilities(*NEEDED)
    with served(path / "run", *options, device=device, account=(0, GROUP), under=under) as process:
        yield str(next(path.glob("run/*.sock")))
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.integration
def test_an_account_has_its_uid_and_its_records_again(accounts, process):
    """The next cell of an account, also that of a device that was started anew, has the same uid, and knows what the
    one before has found out: here, that a file is quarantined.
    """
    prepared = "device.prepare(file_model({!r})).run(ONE)"
    with folder() as path:
        with again(path, *UIDS, device=FILER) as address:
            for client in accounts[:2]:
                words = f"import sys; sys.path.insert(0, {HELPERS!r})", "from worded_files import ONE, file_model"
                assert client.do(*words, f"device = driver.connect({address!r})") is None
            assert accounts[0].do(prepared.format("good")) is None
            engine = process(accounts[1].do(PIDS)[1])
            assert accounts[1].do(prepared.format("one:crash")).startswith("PeerDied")
            assert engine.has_ended()
            again_ = f"device = driver.connect({address!r})", prepared.format("one:crash")
            assert "is quarantined on this device" in accounts[1].do(*again_)
            assert os.stat(f"/proc/{accounts[1].do(PIDS)[1]}").st_uid == SECOND
            assert [client.do("device.close()") for client in accounts[:2]] == [None, None]
        with again(path, *UIDS, device=FILER):
            assert "is quarantined on this device" in accounts[1].do(*again_)
            assert os.stat(f"/proc/{accounts[1].do(PIDS)[1]}").st_uid == SECOND
            assert accounts[1].do("device.close()") is None


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_broker_that_ends_leaves_no_cell(accounts, process, number):
    """Nothing of another uid outlives a broker, whether that is stopped or killed."""
    with foreign(*UIDS, capabilities=NEEDED) as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        pids = [process(pid) for pid in accounts[0].do(PIDS)]
        broker.send_signal(number)
        broker.wait(PATIENCE)
        assert all(each.has_ended() for each in pids)
        assert accounts[0].do("device.close()") is None


@pytest.mark.integration
def test_a_cell_that_does_not_end_is_killed(accounts, process):
    """A broker that is stopped kills a cell of another uid that stands still."""
    with foreign(*UIDS, capabilities=NEEDED) as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        service = process(accounts[0].do(PIDS)[0])
        os.kill(service.pid, signal.SIGSTOP)
        broker.terminate()
        assert broker.wait(PATIENCE) == 0
        assert service.has_ended()
        assert accounts[0].do("device.close()") is None


@pytest.mark.integration
def test_root_serves_with_uids(accounts):
    """Root can give cells uids as well, which then have none of its rights."""
    with folder() as path, served(path / "run", *UIDS, account=(0, GROUP)) as broker:
        lines = CONNECT.format(f"{path}/run/reference.sock"), "out = prepared.run(X)[0].tolist()"
        assert accounts[0].do(*lines) == [[2.0] * 4]
        for pid in accounts[0].do(PIDS):
            assert (status(pid)["Uid"].split()[0], int(status(pid)["CapPrm"], 16)) == (str(FIRST), 0)
        assert accounts[0].do("device.close()") is None
        broker.terminate()
        assert broker.wait(PATIENCE) == 0


@pytest.mark.integration
def test_a_range_that_is_used_up(accounts):
    """An account for which no uid is left is refused, and told so; the others are served."""
    with foreign("--group", GROUP, "--uids", f"{FIRST}-{FIRST}", capabilities=NEEDED) as (address, _):
        assert accounts[0].do(CONNECT.format(address)) is None
        said = accounts[1].do(CONNECT.format(address))
        assert "all 1 uids for accounts are taken; serve the device with more --uids" in said
        with Client(FIRST, GROUP) as cell:
            assert cell.is_ready()
            assert f"uid {FIRST} is one of the device's cells" in cell.do(CONNECT.format(address))
        assert accounts[0].do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert accounts[0].do("device.close()") is None


BECOMES = f"""
import os
from driver.engine import sandbox
from driver.engine.call_rules import becoming
assert sandbox.enter(beside=becoming(range({FIRST}, {LAST + 1})))
outside = 0, 1, {FIRST - 1}, {LAST + 1}, 65534, -1
calls = [(os.setgroups, [number]) for number in (0, {FIRST})]
for number in outside:
    for numbers in ((number, {FIRST}, {FIRST}), ({FIRST}, number, {FIRST}), ({FIRST}, {FIRST}, number)):
        calls += [(os.setresgid, *numbers), (os.setresuid, *numbers)]
calls += [(os.setuid, {FIRST}), (os.setgid, {FIRST}), (os.setreuid, {FIRST}, {FIRST}), (os.setregid, {FIRST}, {FIRST})]
for call, *arguments in calls:
    try:
        call(*arguments)
        print(call, arguments)
    except PermissionError:
        pass
os.setgroups([])
os.setresgid({LAST}, {LAST}, {LAST})
os.setresuid({FIRST}, {FIRST}, {FIRST})
print(os.getresuid(), os.getresgid(), os.getgroups())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other accounts")
def test_the_filter_of_the_broker_leaves_it_the_range_alone():
    """What has taken the broker over becomes no account but those of the range, in no call and by no argument, and
    takes no group.
    """
    said = subprocess.check_output([sys.executable, "-c", BECOMES], text=True)
    assert said == f"{(FIRST,) * 3} {(LAST,) * 3} []\n"


WITHOUT_FILTERS = f"""
import errno, os, platform, sys
sys.path.insert(0, {str(Path(other_accounts.__file__).parent)!r})
from refused_calls import refuse
refuse(errno.ENOSYS, {{"x86_64": 317, "aarch64": 277}}[platform.machine()])
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.integration
def test_without_a_filter_there_is_no_broker_with_capabilities(accounts):
    """Where the kernel takes no filter of system calls, the device ends before it serves anybody, and says why."""
    under = sys.executable, "-c", WITHOUT_FILTERS
    with foreign(*UIDS, capabilities=NEEDED, under=under) as (address, broker):
        assert broker.wait(PATIENCE) == 1
        assert not Path(address).exists()
        assert "could become any account, as nothing filters" in (Path(address).parents[1] / "log").read_text()


@pytest.mark.parametrize("text", ["7", "7-", "9-8", "0-9", "-5-9", "4294967290-4294967295", "7-9,11", "7-5000", "own"])
def test_what_is_no_range_is_refused(text):
    """A range has two numbers that are uids and gids, and neither root's nor the device's own account's."""
    text = f"{os.getuid()}-{os.getuid() + 9}" if text == "own" else text
    with pytest.raises(DeviceFailed, match=f"--uids {text}: must be FIRST-LAST"):
        uids_in(text)


@pytest.mark.integration
def test_an_account_without_the_capabilities_is_refused(accounts):
    """It is told which one it lacks, and how it gets it, before anything is served."""
    without = foreign(*UIDS, capabilities=NEEDED[:2])
    with pytest.raises(AssertionError, match="lacks CAP_SETUID, CAP_SETGID or CAP_KILL: have systemd"), without:
        pass


@pytest.mark.integration
def test_homes_are_of_one_range_and_within_reach(accounts):
    """Homes that were made for another range, and those that no cell could reach, are refused with the remedy; a range
    may become longer.
    """
    with folder() as path:
        with again(path, *UIDS):
            pass
        another = again(path, "--group", GROUP, "--uids", f"{LAST + 1}-{LAST + 9}")
        words = f"made for other numbers, such as {FIRST}: give these, too, or remove it"
        with pytest.raises(AssertionError, match=words), another:
            pass
        with again(path, "--group", GROUP, "--uids", f"{FIRST}-{LAST + 1}"):
            assert (path / f".local/state/burst-cells/free-{LAST + 1}").stat().st_uid == LAST + 1
        (path / ".local").chmod(0o700)
        words = f"other accounts may not enter {path}/.local: chmod o[+]x {path}/.local"
        with pytest.raises(AssertionError, match=words), again(path, *UIDS):
            pass


def test_a_range_is_for_a_group():
    """Where one account alone may connect, `--uids` is refused; with `--unit` a wrong range is."""
    for words in (["reference", "--uids", f"{FIRST}-{LAST}"], ["--unit", "--uids", "1"]):
        done = CliRunner().invoke(command, ["serve", *words])
        assert (done.exit_code, "--uids" in done.output) == (2, True)


def test_the_unit_of_a_range():
    """`--unit --uids` prints the unit with the three capabilities, the option, and a home that cells may go through."""
    done = CliRunner().invoke(command, ["serve", "--unit", "--uids", f"{FIRST}-{LAST}", "--group", "inference"])
    assert f" serve %i --group inference --uids {FIRST}-{LAST} $BURST_OPTIONS\n" in done.output
    for setting in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert f"\n{setting}=CAP_SETUID CAP_SETGID CAP_KILL\n" in done.output
    assert "\nStateDirectoryMode=0711\n" in done.output
